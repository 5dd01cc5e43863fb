"""Each stage reduces its gradients right after its last W, while the rank still computes for its other stages."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.pipelining.schedule.action import WEIGHT_GRADIENTS, Action, Op
from disttrain.pipelining.schedule.schedule import Schedule


def reduce_gradients(schedule: Schedule) -> Schedule:
    """One REDUCE_GRAD per stage; none where there is no backward."""
    return schedule.with_ranks([_reduce(actions) for actions in schedule.ranks])


def _reduce(actions: Sequence[Action]) -> list[Action]:
    last = {
        part.stage: position
        for position, action in enumerate(actions)
        for part in action.parts
        if part.op in WEIGHT_GRADIENTS
    }
    reduced: list[Action] = []
    for position, action in enumerate(actions):
        reduced.append(action)
        done = (part.stage for part in action.parts if last.get(part.stage) == position)
        reduced += (Action(Op.REDUCE_GRAD, stage) for stage in dict.fromkeys(done))
    return reduced
