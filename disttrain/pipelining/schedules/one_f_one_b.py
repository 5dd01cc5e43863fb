"""1F1B: after a warmup, a backward follows each forward (PipeDream-Flush, arXiv:2006.09503)."""

from __future__ import annotations

from disttrain.pipelining.schedule.action import Action, Op
from disttrain.pipelining.schedule.placement import Placement
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.schedules.alternating import alternating
from disttrain.pipelining.schedules.counts import require_counts


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """One stage per rank. Bubble (p - 1) / (m + p - 1); rank r holds min(m, p - r) microbatches.

    The order is that in which torch runs it. The list that torch 2.13 has of it (`pipeline_order`) is wrong on the last
    rank: it leaves out microbatch 0 and ends with one that does not exist. Fewer microbatches than ranks are fine here.
    """
    require_counts("1F1B", num_ranks, num_microbatches)
    ranks = []
    for rank in range(num_ranks):
        forwards, backwards = (
            [Action(op, rank, microbatch) for microbatch in range(num_microbatches)] for op in (Op.FORWARD, Op.BACKWARD)
        )
        ranks.append(alternating(forwards, backwards, num_ranks - 1 - rank))
    return Schedule("1F1B", Placement.loop(num_ranks), num_microbatches, tuple(map(tuple, ranks)))
