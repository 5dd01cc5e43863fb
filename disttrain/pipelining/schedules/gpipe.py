"""GPipe: all forwards, then all backwards (Huang et al., arXiv:1811.06965)."""

from __future__ import annotations

from disttrain.pipelining.schedule.action import Action, Op
from disttrain.pipelining.schedule.placement import Placement
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.schedules.counts import require_counts


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """One stage per rank. Bubble (p - 1) / (m + p - 1); every rank holds all m microbatches."""
    require_counts("GPipe", num_ranks, num_microbatches)
    ranks = tuple(
        tuple(
            Action(op, rank, microbatch) for op in (Op.FORWARD, Op.BACKWARD) for microbatch in range(num_microbatches)
        )
        for rank in range(num_ranks)
    )
    return Schedule("GPipe", Placement.loop(num_ranks), num_microbatches, ranks)
