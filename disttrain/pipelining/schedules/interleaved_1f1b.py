"""Interleaved 1F1B: several stages per rank, so that the pipeline fills faster (Megatron-LM, arXiv:2104.04473)."""

from __future__ import annotations

from disttrain.pipelining.schedule.action import Op
from disttrain.pipelining.schedule.placement import Placement
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.schedules.alternating import alternating, rounds
from disttrain.pipelining.schedules.counts import microbatches_per_round, require_counts


def interleaved_1f1b(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """With v stages per rank, 1 / v of 1F1B's bubble: (p - 1) / (v m + p - 1), for m a multiple of p.

    As in torch, microbatches go in rounds of equal size, which need not be num_ranks.
    Raises: ScheduleError when they cannot.
    """
    require_counts("Interleaved1F1B", num_ranks, num_microbatches, stages_per_rank)
    per_round = microbatches_per_round("Interleaved1F1B", num_ranks, num_microbatches)
    placement = Placement.loop(num_ranks, stages_per_rank)
    ranks = []
    for rank, stages in enumerate(placement.stages):
        num_warmup = (stages_per_rank - 1) * per_round + 2 * (num_ranks - 1 - rank)
        forwards = rounds(Op.FORWARD, stages, num_microbatches, per_round)
        backwards = rounds(Op.BACKWARD, stages[::-1], num_microbatches, per_round)
        ranks.append(alternating(forwards, backwards, num_warmup))
    return Schedule("Interleaved1F1B", placement, num_microbatches, tuple(map(tuple, ranks)))
