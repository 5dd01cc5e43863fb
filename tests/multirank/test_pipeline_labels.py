"""Observers, such as the flight recorder, see which stage and microbatch each message of a pipeline belongs to."""

from __future__ import annotations

import disttrain
from disttrain.errors import DisttrainError
from disttrain.pipelining import PipelineStage, ScheduleZBVZeroBubble, lower, make_schedule
from disttrain.pipelining.schedule.action import MESSAGES
from disttrain.process_group.watching.observer import Call
from disttrain.testing import run_threads
from tests.cases.pipelines import mlp, rows


class _Seen:
    def __init__(self) -> None:
        self.labels: list[str] = []

    def enqueued(self, call: Call) -> None:
        if call.operation in ("send", "recv"):
            self.labels.append(call.action)

    def completed(self, call: Call, error: DisttrainError | None) -> None:
        """Nothing to note."""


def _labels() -> list[str]:
    rank, world = disttrain.get_rank(), disttrain.current_world()
    modules = mlp(4)
    stages = [PipelineStage(modules[index], index, 4, "cpu") for index in ((0, 3), (1, 2))[rank]]
    schedule = ScheduleZBVZeroBubble(stages, 4, loss_fn=lambda output, target: (output - target).square().mean())
    # In the first step receives are posted when they are needed, so by what needs them.
    schedule.step(rows(8), target=rows(8, seed=2))
    seen = _Seen()
    world.add_observer(seen)
    schedule.step(rows(8), target=rows(8, seed=2))
    world.remove_observer(seen)
    return seen.labels


def test_every_send_and_receive_is_labelled() -> None:
    lowered = lower(make_schedule("ZBV", 2, 4))
    for found, actions in zip(run_threads(2, _labels), lowered.ranks, strict=True):
        messages = [one for one in actions if one.op in MESSAGES]
        expected = [f"stage {one.stage} microbatch {one.microbatch} {one.op.value}" for one in messages]
        # Receives are posted early, past sends.
        assert sorted(found) == sorted(expected)
        sends = [[label for label in labels if "SEND" in label] for labels in (found, expected)]
        assert sends[0] == sends[1]
