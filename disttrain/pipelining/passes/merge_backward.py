"""Merges an I and the W right after it into one B, which autograd runs as one pass. That is cheaper, but ranks that
wait for the gradients of inputs then wait for those of weights as well."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.pipelining.schedule.action import Action, Op
from disttrain.pipelining.schedule.schedule import Schedule


def merge_backward(schedule: Schedule) -> Schedule:
    """The schedule with every such pair merged. Where W comes later, as zero bubble schedules have it, it stays."""
    return schedule.with_ranks([_merge(actions, frozenset(range(schedule.num_stages))) for actions in schedule.ranks])


def merge_where_free(schedule: Schedule) -> Schedule:
    """The schedule with the pairs of the first stage merged: no rank waits for its gradients of inputs."""
    free = frozenset(stage for stage in range(schedule.num_stages) if not schedule.sources[stage])
    return schedule.with_ranks([_merge(actions, free) for actions in schedule.ranks])


def split_backward(schedule: Schedule) -> Schedule:
    """Every B as I and W; within an OVERLAP it stays, since its W would no longer be hidden."""
    return schedule.with_ranks([[part for action in actions for part in _split(action)] for actions in schedule.ranks])


def _merge(actions: Sequence[Action], stages: frozenset[int]) -> list[Action]:
    merged: list[Action] = []
    for action in actions:
        is_pair = bool(merged) and merged[-1] == Action(Op.BACKWARD_INPUT, action.stage, action.microbatch)
        if action.op is Op.BACKWARD_WEIGHT and is_pair and action.stage in stages:
            merged[-1] = action._replace(op=Op.BACKWARD)
        else:
            merged.append(action)
    return merged


def _split(action: Action) -> tuple[Action, ...]:
    if action.op is not Op.BACKWARD:
        return (action,)
    return action._replace(op=Op.BACKWARD_INPUT), action._replace(op=Op.BACKWARD_WEIGHT)
