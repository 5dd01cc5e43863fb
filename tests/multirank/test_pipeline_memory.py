"""What a rank keeps: as many microbatches as the schedule says, and nothing that has been sent."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import disttrain
from disttrain.pipelining import PipelineSchedule, PipelineStage, Schedule, lower, make_schedule, peaks
from disttrain.testing import run_threads
from tests.cases.pipelines import DIM, mean_square, mlp, rows


def runner_of(plan: Schedule, stages: dict[int, nn.Module]) -> PipelineSchedule:
    made = [PipelineStage(stage, index, plan.num_stages, "cpu") for index, stage in stages.items()]
    return PipelineSchedule(made, plan, mean_square)


def step(runner: PipelineSchedule, num_rows: int, seed: int = 1) -> None:
    x, y = rows(num_rows, seed=seed), rows(num_rows, seed=seed + 1)
    last = runner.schedule.num_stages - 1
    runner.step(
        *((x,) if 0 in runner.stages else ()), target=y if last in runner.stages else None, return_outputs=False
    )


@pytest.mark.parametrize(
    "name", ["GPipe", "1F1B", "Interleaved1F1B", "ZB-H1", "ZB-H2", "ZBV", "V-Half", "V-Min", "DualPipeV"]
)
def test_as_many_are_kept_as_the_schedule_says(name: str) -> None:
    plan = make_schedule(name, 3, 9)

    def rank() -> int:
        most = 0
        stages = {index: mlp(plan.num_stages)[index] for index in plan.placement.stages[disttrain.get_rank()]}
        runner = runner_of(plan, stages)

        def count(*_: object) -> None:
            nonlocal most
            assert runner._running is not None
            # The one that is now computed comes to them.
            most = max(most, len(runner._running._executor._now.in_flight) + 1)

        for stage in stages.values():
            stage.register_forward_hook(count)
        step(runner, 9)
        step(runner, 9)
        assert runner._running is not None
        assert not runner._running._executor._now.in_flight
        return most

    assert run_threads(3, rank) == [peak.held for peak in peaks(lower(plan))]


class Plain(nn.Module):
    """Its backward needs its input, and not its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM).double()
        self.outputs: list[StorageWeakRef] = []
        self.alive: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.outputs.append(StorageWeakRef(y.untyped_storage()))
        y.register_hook(lambda _: self.alive.append(sum(not output.expired() for output in self.outputs)))
        return y


@pytest.mark.parametrize("name", ["GPipe", "ZB-H1"])
def test_what_was_sent_is_not_kept_for_the_backward(name: str) -> None:
    plan = make_schedule(name, 2, 16)

    def rank() -> list[int]:
        stage = Plain()
        runner = runner_of(plan, {disttrain.get_rank(): stage})
        step(runner, 16)
        # While metadata is learnt, who sends does not wait: that could be for each other.
        stage.outputs.clear()
        stage.alive.clear()
        step(runner, 16)
        return stage.alive

    first, _ = run_threads(2, rank)
    assert len(first) == 16
    # A few may still be on their way.
    assert max(first) <= 5, first


def test_what_a_hook_keeps_is_not_written_over() -> None:
    plan = make_schedule("1F1B", 2, 4)

    def rank() -> list[tuple[torch.Tensor, torch.Tensor]]:
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        index = disttrain.get_rank()
        stage = mlp(2)[index]
        stage.register_forward_pre_hook(lambda _, args: kept.append((args[0], args[0].detach().clone())))
        runner = runner_of(plan, {index: stage})
        for turn in range(3):
            step(runner, 4, seed=turn)
        return kept

    for kept in run_threads(2, rank):
        assert len(kept) == 12
        for seen, copied in kept:
            torch.testing.assert_close(seen.detach(), copied, rtol=0, atol=0)


def test_buffers_are_few() -> None:
    """As many as are in use at once, however many steps there are."""
    plan = make_schedule("1F1B", 2, 32)

    def rank() -> int:
        index = disttrain.get_rank()
        runner = runner_of(plan, {index: mlp(2)[index]})
        for _ in range(4):
            step(runner, 32)
        assert runner._running is not None
        return runner._running._executor._streams.buffers(index).num_bytes // (DIM * 8)

    # One in flight, one that is received ahead, and those that the other thread has not let go of.
    assert max(run_threads(2, rank)) <= 8
