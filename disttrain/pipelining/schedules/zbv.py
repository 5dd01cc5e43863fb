"""ZBV: zero bubble on a V, at 1F1B's memory (Qi et al., arXiv:2401.10241, section 6)."""

from __future__ import annotations

from collections.abc import Iterator

from disttrain.pipelining.schedule.action import Action, Op
from disttrain.pipelining.schedule.placement import Placement
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.schedules.counts import require_counts

F, I, W = Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT  # noqa: E741


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two stages per rank. Without gaps once a rank has begun, when F = I = W and there are 2 p - 1 microbatches.

    With fewer it is the order for 2 p - 1 without those that aren't there.
    """
    require_counts("ZBVZeroBubble", num_ranks, num_microbatches)
    placement = Placement.v(num_ranks)
    ranks = tuple(
        tuple(
            action
            for action in _order(num_ranks, rank, stages, num_microbatches)
            if _is_there(action, num_microbatches)
        )
        for rank, stages in enumerate(placement.stages)
    )
    return Schedule("ZBVZeroBubble", placement, num_microbatches, ranks)


def _is_there(action: Action, num_microbatches: int) -> bool:
    return action.microbatch is not None and action.microbatch < num_microbatches


def _order(num_ranks: int, rank: int, stages: tuple[int, ...], num_microbatches: int) -> Iterator[Action]:
    there, back = stages
    num_microbatches = max(2 * num_ranks - 1, num_microbatches)
    counts = {(op, stage): 0 for op in (F, I, W) for stage in stages}

    def act(stage: int, *ops: Op) -> Iterator[Action]:
        for op in ops:
            yield Action(op, stage, counts[op, stage])
            counts[op, stage] += 1

    for _ in range(2 * (num_ranks - rank) - 1):
        yield from act(there, F)
    for _ in range(rank):
        yield from act(back, F)
        yield from act(there, F)
    for _ in range(num_ranks - rank):
        yield from act(back, F, I, W)
    while counts[F, back] < num_microbatches:
        yield from act(there, *((F, I, W) if counts[F, there] < num_microbatches else (I, W)))
        yield from act(back, F, I, W)
    for _ in range(rank):
        yield from act(there, I)
        yield from act(back, I)
    for _ in range(num_ranks - rank):
        yield from act(there, I, W)
    for stage in (back, there):
        yield from act(stage, *[W] * (counts[I, stage] - counts[W, stage]))
