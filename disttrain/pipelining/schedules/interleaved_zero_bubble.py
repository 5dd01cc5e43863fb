"""Interleaved zero bubble: W fills gaps, several stages per rank (ZB1P of Qi et al., arXiv:2401.10241)."""

from __future__ import annotations

from disttrain.pipelining.schedule.action import Op
from disttrain.pipelining.schedule.placement import Placement
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.schedules.alternating import alternating, rounds
from disttrain.pipelining.schedules.counts import microbatches_per_round, require_counts


def interleaved_zero_bubble(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Rank r puts W off by r microbatches, which needs no more memory than rank 0 has anyway.

    Raises: ScheduleError when microbatches cannot go in rounds of equal size.
    """
    require_counts("InterleavedZeroBubble", num_ranks, num_microbatches, stages_per_rank)
    per_round = microbatches_per_round("InterleavedZeroBubble", num_ranks, num_microbatches)
    placement = Placement.loop(num_ranks, stages_per_rank)
    ranks = []
    for rank, stages in enumerate(placement.stages):
        num_warmup = (stages_per_rank - 1) * per_round + num_ranks - 1 - rank
        forwards = rounds(Op.FORWARD, stages, num_microbatches, per_round)
        backwards = rounds(Op.BACKWARD_INPUT, stages[::-1], num_microbatches, per_round)
        ranks.append(alternating(forwards, backwards, num_warmup, weights_behind=rank))
    return Schedule("InterleavedZeroBubble", placement, num_microbatches, tuple(map(tuple, ranks)))
