"""ZB-H2: forwards enough ahead that no rank waits, at twice 1F1B's memory (Qi et al., arXiv:2401.10241, 2.3)."""

from __future__ import annotations

from disttrain.pipelining.schedule.action import Op
from disttrain.pipelining.schedule.placement import Placement
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.schedules.alternating import alternating, rounds
from disttrain.pipelining.schedules.counts import require_counts


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """One stage per rank. Idle for (p - 1) (F + I - 2 W), so never when F = I = W, from 2 p - 1 microbatches on; each
    rank holds 2 p - 1 of them."""
    require_counts("ZB-H2", num_ranks, num_microbatches)
    ranks = []
    for rank in range(num_ranks):
        forwards = rounds(Op.FORWARD, [rank], num_microbatches, num_microbatches)
        backwards = rounds(Op.BACKWARD_INPUT, [rank], num_microbatches, num_microbatches)
        ranks.append(alternating(forwards, backwards, 2 * (num_ranks - 1 - rank), weights_behind=2 * rank))
    return Schedule("ZB-H2", Placement.loop(num_ranks), num_microbatches, tuple(map(tuple, ranks)))
