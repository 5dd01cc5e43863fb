"""An I and the W right after it are one B, which autograd runs in one go."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.pipelining.action import Action, Op
from disttrain.pipelining.schedule import Schedule


def merge_backward(schedule: Schedule) -> Schedule:
    """The schedule with every such pair merged. Where W waits, as in zero bubble schedules, it stays."""
    return schedule.with_ranks([_merge(actions) for actions in schedule.ranks])


def split_backward(schedule: Schedule) -> Schedule:
    """Every B as I and W; within an OVERLAP it stays, since its W would no longer be hidden."""
    return schedule.with_ranks([[part for action in actions for part in _split(action)] for actions in schedule.ranks])


def _merge(actions: Sequence[Action]) -> list[Action]:
    merged: list[Action] = []
    for action in actions:
        if action.op is Op.BACKWARD_WEIGHT and merged and merged[-1] == action._replace(op=Op.BACKWARD_INPUT):
            merged[-1] = action._replace(op=Op.BACKWARD)
        else:
            merged.append(action)
    return merged


def _split(action: Action) -> tuple[Action, ...]:
    if action.op is not Op.BACKWARD:
        return (action,)
    return action._replace(op=Op.BACKWARD_INPUT), action._replace(op=Op.BACKWARD_WEIGHT)
