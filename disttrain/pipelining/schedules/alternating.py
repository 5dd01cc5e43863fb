"""The order that the 1F1B family shares: some forwards, then forward and backward in turn, then the backwards that are
left."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.pipelining.schedule.action import Action, Op


def alternating(
    forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int, *, weights_behind: int = 0
) -> list[Action]:
    """One rank's order, for as many forwards as backwards.

    Args: num_warmup  forwards before the first pair of forward and backward;  weights_behind  where the backwards are
          I: how many of them come before the first W, which from then on follows each I.
    """
    num_warmup = min(num_warmup, len(forwards))
    order = list(forwards[:num_warmup])
    for position, backward in enumerate(backwards):
        order += forwards[num_warmup + position : num_warmup + position + 1]
        order.append(backward)
        if backward.op is Op.BACKWARD_INPUT and position >= weights_behind:
            order.append(weight_of(backwards[position - weights_behind]))
    if backwards and backwards[0].op is Op.BACKWARD_INPUT:
        order += map(weight_of, backwards[max(0, len(backwards) - weights_behind) :])
    return order


def weight_of(backward: Action) -> Action:
    """The W that an I leaves."""
    return Action(Op.BACKWARD_WEIGHT, backward.stage, backward.microbatch)


def rounds(op: Op, stages: Sequence[int], num_microbatches: int, per_round: int) -> list[Action]:
    """Depth first: `per_round` microbatches through each stage in turn, then the next ones."""
    return [
        Action(op, stage, microbatch)
        for first in range(0, num_microbatches, per_round)
        for stage in stages
        for microbatch in range(first, first + per_round)
    ]
