"""V-Half: half of 1F1B's memory, and less of a bubble (Qi et al., arXiv:2405.15362, section 3)."""

from __future__ import annotations

from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.schedules.building_block import repeat_block
from disttrain.pipelining.schedules.counts import require_counts


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two stages per rank. A rank holds (p + 2) // 2 microbatches at most; it idles for less than 3 p units of
    F = I = W, where 1F1B with its stages twice as long idles for 6 (p - 1)."""
    require_counts("V-Half", num_ranks, num_microbatches)
    turn = 3 if num_ranks % 2 == 0 else 0  # else blocks would collide
    blocks = [
        (2 * rank, 3 * num_ranks - 2 - rank, 3 * num_ranks + turn - 1 + 2 * rank, 6 * num_ranks + turn - 2 - rank)
        for rank in range(num_ranks)
    ]
    return repeat_block("V-Half", num_microbatches, blocks, most_held=2 * ((num_ranks + 2) // 2))
