"""V-Min: as little memory as blocks on a V can do with, a third of 1F1B's (Qi et al., arXiv:2405.15362, section 3)."""

from __future__ import annotations

from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.schedules.building_block import repeat_block
from disttrain.pipelining.schedules.counts import require_counts


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two stages per rank. A rank holds (p + 4) // 3 microbatches at most; it idles for less than 4 p units of
    F = I = W, where 1F1B with its stages twice as long idles for 6 (p - 1)."""
    require_counts("V-Min", num_ranks, num_microbatches)
    turn = 2 if num_ranks % 3 == 0 else 0  # else blocks would collide
    blocks = [
        (rank, 2 * num_ranks - 1 - rank, 2 * num_ranks + turn + rank, 4 * num_ranks + turn - 1 - rank)
        for rank in range(num_ranks)
    ]
    return repeat_block("V-Min", num_microbatches, blocks, most_held=2 * ((num_ranks + 4) // 3))
