"""The order of computations is torch's, where torch has the schedule; CSV goes both ways.

torch's classes want stages; stand-ins with what they ask of one will do, since nothing runs.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as theirs

from disttrain.errors import ScheduleError
from disttrain.pipelining import Op, Schedule, from_csv, lower, make_schedule, parse_action, simulate, to_csv, verify
from disttrain.pipelining.schedule.verifier import find_problems

SINGLE = {"GPipe": theirs.ScheduleGPipe, "1F1B": theirs.Schedule1F1B}
MULTI = {
    "Interleaved1F1B": theirs.ScheduleInterleaved1F1B,
    "LoopedBFS": theirs.ScheduleLoopedBFS,
    "InterleavedZeroBubble": theirs.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": theirs.ScheduleZBVZeroBubble,
    "DualPipeV": theirs.ScheduleDualPipeV,
}
COUNTS = [(p, m) for p in range(2, 9) for m in (1, 2, p - 1, p, p + 1, 2 * p, 2 * p + 3, 3 * p, 4 * p)]


def _stage(num_ranks: int, num_stages: int, rank: int = 0) -> Any:
    return SimpleNamespace(
        num_stages=num_stages,
        group_size=num_ranks,
        group_rank=rank,
        stage_index=rank,
        is_first=rank == 0,
        is_last=rank == num_stages - 1,
        submod=torch.nn.Identity(),
        stage_index_to_group_rank={},
    )


def _theirs(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Any:
    stages = [_stage(num_ranks, num_ranks * stages_per_rank) for _ in range(stages_per_rank)]
    if name in SINGLE:
        return SINGLE[name](stages[0], num_microbatches)
    return MULTI[name](stages, num_microbatches)


def _computations(order: dict[int, list[Any]]) -> list[list[str]]:
    kept = ([str(action) for action in order[rank] if action is not None] for rank in sorted(order))
    return [[text for text in texts if "REDUCE_GRAD" not in text] for texts in kept]


def _texts(schedule: Schedule) -> list[list[str]]:
    return [list(map(str, actions)) for actions in schedule.ranks]


CASES = [
    *((name, 1) for name in SINGLE),
    *((name, stages) for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble") for stages in (1, 2, 3)),
    ("ZBVZeroBubble", 2),
    ("DualPipeV", 2),
]


@pytest.mark.parametrize(("name", "stages"), CASES)
def test_computations_are_in_the_order_of_torch(name: str, stages: int) -> None:
    """And what we refuse, torch does; it refuses 1F1B with fewer microbatches than ranks as well."""
    num_compared = 0
    for p, m in COUNTS:
        if name == "1F1B" and m < p:
            with pytest.raises(ValueError, match="greater than"):
                _theirs(name, p, m, stages)
            continue
        try:
            ours = make_schedule(name, p, m, stages)
        except ScheduleError:
            with pytest.raises(ValueError, match="requires"):
                _theirs(name, p, m, stages)
            continue
        order = _computations(_theirs(name, p, m, stages).pipeline_order)
        if name == "1F1B":
            # Its list for the last rank begins with microbatch 1, and ends with one that does not exist.
            assert order[-1][0] == f"{p - 1}F1"
            order[-1] = _texts(ours)[-1]
        assert order == _texts(ours), (p, m)
        num_compared += 1
    assert num_compared > 20


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (2, 4), (4, 4), (4, 9), (8, 16)])
def test_1f1b_is_in_the_order_that_torch_runs(p: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its executor does not follow its list, and is right on all ranks."""
    monkeypatch.setattr(theirs.Schedule1F1B, "_initialize_stage", lambda *_: None)
    ours = _texts(make_schedule("1F1B", p, m))
    for rank in range(p):
        done: list[str] = []
        asked = {
            "forward_one_chunk": lambda one, *_, done=done, rank=rank, **__: done.append(f"{rank}F{one}"),
            "backward_one_chunk": lambda one, done=done, rank=rank, **_: done.append(f"{rank}B{one}"),
            "perform_reduce_grad": lambda _, done=done: done.append("reduce"),
            **{f"get_{kind}_ops": lambda _: [] for kind in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send")},
        }
        stage: Any = SimpleNamespace(**vars(_stage(p, p, rank)), **asked)
        theirs.Schedule1F1B(stage, m)._step_microbatches([()] * m, [{}] * m)
        assert done == [*ours[rank], "reduce"]


@pytest.mark.parametrize("name", [*SINGLE, *MULTI])
def test_their_csv_is_read(name: str, tmp_path: Path) -> None:
    """Of computations, and with what torch adds to them: both pass our checks, except 1F1B's list."""
    p, m, stages = 4, 8, 1 if name in SINGLE else 2
    schedule = _theirs(name, p, m, stages)
    path = tmp_path / "schedule.csv"
    if name in SINGLE:
        path.write_text("\n".join(",".join(map(str, schedule.pipeline_order[rank])) for rank in range(p)))
        read = from_csv(path.read_text())
    else:
        schedule._dump_csv(path, "compute_only")
        read = from_csv(path.read_text(), name)
        schedule._dump_csv(path, "compute_comms")
        complete = from_csv(path.read_text())
        verify(complete)
        assert simulate(complete).makespan_s >= simulate(read).makespan_s
        assert complete.compute_only().ranks == read.ranks
        assert to_csv(complete) == path.read_text().replace("\r\n", "\n")
    if name == "1F1B":
        assert "Stage 3 has B for microbatch 0;" in find_problems(read)[3].text
        return
    verify(read)
    assert read.compute_only().ranks == make_schedule(name, p, m).ranks
    assert (read.placement, read.num_microbatches) == (make_schedule(name, p, m).placement, m)


@pytest.mark.parametrize("name", [*MULTI, "V-Half", "V-Min", "ZB-H1"])
def test_our_csv_is_read_by_torch(name: str, tmp_path: Path) -> None:
    p, m = 4, 8
    ours = make_schedule(name, p, m)
    stages = len(ours.placement.stages[0])
    runtime: Any = theirs._PipelineScheduleRuntime([_stage(p, p * stages) for _ in range(stages)], m)
    for schedule, form in ((ours, "compute_only"), (lower(ours), "compute_comms")):
        path = tmp_path / f"{form}.csv"
        path.write_text(to_csv(schedule))
        runtime._load_csv(path, form)
        if form == "compute_comms":
            assert _computations(runtime.pipeline_order_with_comms) == [
                [text for text in texts if "REDUCE_GRAD" not in text] for texts in _texts(schedule)
            ]
        runtime._dump_csv(path, form)
        assert from_csv(path.read_text()).ranks == schedule.ranks


def test_texts_are_theirs() -> None:
    for action in (action for actions in lower(make_schedule("DualPipeV", 4, 8)).ranks for action in actions):
        text = str(action)
        assert str(theirs._Action.from_str(text)) == text
        assert parse_action(str(theirs._Action.from_str(text))) == action
    assert {op.value for op in Op} - {"SEND_TIED", "RECV_TIED"} == {kind.value for kind in theirs._ComputationType}


def test_their_validator_accepts_what_ours_does_not() -> None:
    """A duplicate, and two ranks that wait for each other."""
    for text, problem in (
        ("0F0,0F0,0B0\n1F0,1B0", "is there 2 times"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0", "wait for each"),
    ):
        rows = {
            rank: [theirs._Action.from_str(cell) for cell in row.split(",")]
            for rank, row in enumerate(text.split("\n"))
        }
        read = from_csv(text)
        assert theirs._validate_schedule(rows, 2, 2, read.num_microbatches) == {0: 0, 1: 1}
        assert problem in find_problems(read)[0].text
