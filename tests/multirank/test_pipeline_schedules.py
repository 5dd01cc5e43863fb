"""Every schedule trains as one process does."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules as theirs

import disttrain
from disttrain.errors import ScheduleError
from disttrain.pipelining import Costs, Schedule, from_csv, make_schedule, search
from disttrain.pipelining.schedule.catalogue import SCHEDULE_KINDS
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.pipelines import Case, assert_same_state, close, mlp, rows, run_rank, run_whole, same_as_whole


def _all() -> list[Schedule]:
    """Of each kind, for two counts of microbatches by each count of ranks."""
    found = []
    names = [kind.name for kind in SCHEDULE_KINDS if kind.name != "ForwardOnly"]
    counts = [(2, 4), (2, 9), (3, 4), (3, 9), (4, 8), (4, 9)]
    for name, (num_ranks, num), per_rank in itertools.product(names, counts, (1, 2)):
        try:
            found.append(make_schedule(name, num_ranks, num, per_rank))
        except ScheduleError:
            continue
    return found


def _case(schedule: Schedule) -> Case:
    num_rows = 2 * schedule.num_microbatches
    return Case(mlp(schedule.num_stages), (rows(num_rows),), rows(num_rows, seed=2))


def _name(schedule: Schedule) -> str:
    return f"{schedule.name}-{schedule.num_ranks}x{len(schedule.placement.stages[0])}-{schedule.num_microbatches}"


@pytest.mark.parametrize("schedule", _all(), ids=_name)
def test_every_schedule(schedule: Schedule) -> None:
    same_as_whole(_case(schedule), schedule)


def test_there_are_all() -> None:
    assert {schedule.name for schedule in _all()} == {kind.name for kind in SCHEDULE_KINDS} - {"ForwardOnly"}


@pytest.mark.parametrize("max_bytes", [3.0, float("inf")])
def test_schedules_that_are_found(max_bytes: float) -> None:
    """By a search, for two ranks and three."""
    costs = Costs(forward_s=1.0, backward_input_s=1.3, backward_weight_s=0.7, live_bytes=1.0, pending_bytes=0.5)
    for num_ranks in (2, 3):
        found = search(num_ranks, 6, costs, max_bytes=max_bytes, num_changes=10).schedule
        same_as_whole(_case(found), found)


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_what_torch_has_written(name: str, form: str, tmp_path: Path) -> None:
    """With its messages, and without."""
    stages: Any = [
        SimpleNamespace(
            num_stages=4,
            group_size=2,
            group_rank=0,
            stage_index=index,
            is_first=False,
            is_last=False,
            submod=nn.Identity(),
            stage_index_to_group_rank={},
        )
        for index in (0, 2)
    ]
    path = tmp_path / "schedule.csv"
    getattr(theirs, f"Schedule{name}")(stages, 6)._dump_csv(path, form)
    plan = from_csv(path.read_text())
    assert plan.has_messages == (form == "compute_comms")
    same_as_whole(_case(plan), plan)


@on_ranks(4)
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_on_processes(name: str) -> None:
    plan = make_schedule(name, disttrain.get_world_size(), 8)
    case = _case(plan)
    found, expected = run_rank(case, plan), run_whole(case, 8)
    assert_same_state(found, expected, case.atol)
    if plan.num_stages - 1 in found.stages:
        close(found.losses, expected.losses, case.atol)
        close(found.outputs, expected.outputs, case.atol)


def test_all_have_one_loss() -> None:
    """Four stages, whichever ranks run them in whichever order."""
    losses = {}
    for name, num_ranks, per_rank in (("GPipe", 4, 1), ("1F1B", 4, 1), ("Interleaved1F1B", 2, 2), ("ZBV", 2, 2)):
        plan = make_schedule(name, num_ranks, 8, per_rank)
        found = same_as_whole(_case(plan), plan)
        losses[name] = torch.stack(found[plan.placement.ranks[-1]].losses[1])
    assert all(torch.equal(loss, losses["GPipe"]) for loss in losses.values())
