"""ZB-H1: 1F1B with W in a third of its bubble, at its memory (Qi et al., arXiv:2401.10241, section 2.3)."""

from __future__ import annotations

from disttrain.pipelining.schedule.action import Op
from disttrain.pipelining.schedule.placement import Placement
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.schedules.alternating import alternating, rounds
from disttrain.pipelining.schedules.counts import require_counts


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """One stage per rank. Idle for (p - 1) (F + I - W); no rank holds more than p microbatches."""
    require_counts("ZB-H1", num_ranks, num_microbatches)
    ranks = []
    for rank in range(num_ranks):
        forwards = rounds(Op.FORWARD, [rank], num_microbatches, num_microbatches)
        backwards = rounds(Op.BACKWARD_INPUT, [rank], num_microbatches, num_microbatches)
        ranks.append(alternating(forwards, backwards, num_ranks - 1 - rank, weights_behind=rank))
    return Schedule("ZB-H1", Placement.loop(num_ranks), num_microbatches, tuple(map(tuple, ranks)))
