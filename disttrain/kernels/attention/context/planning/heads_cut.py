"""Divides heads: over ranks, when they are exchanged for positions, and into groups that follow each other. Pure."""

from __future__ import annotations

from typing import Final

_GROUP_ELEMENTS: Final = 1 << 25
"""Of the queries of a group: enough to keep a GPU busy, and 128 MiB of each sum in fp32."""


def heads_divide(num_heads: int, num_kv_heads: int, num_ranks: int) -> bool:
    """True if each rank can have as many heads as others."""
    return num_heads % num_ranks == 0 and (num_kv_heads % num_ranks == 0 or num_ranks % max(1, num_kv_heads) == 0)


def kv_heads_of(rank: int, num_kv_heads: int, num_ranks: int) -> range:
    """The heads of keys that serve a rank's heads of queries."""
    if num_kv_heads >= num_ranks:
        each = num_kv_heads // num_ranks
        return range(rank * each, (rank + 1) * each)
    first = rank * num_kv_heads // num_ranks
    return range(first, first + 1)


def num_head_groups(num_kv_heads: int, num_elements: int) -> int:
    """Into how many groups the heads of a rank are divided that are computed one behind the other.

    Sums in fp32 and what kernels need beside their results are then those of one group, so that a rank takes no more
    memory than its share of one rank's attention.

    Args: num_elements  of the queries of the rank that has most.
    """
    counts = [count for count in range(1, num_kv_heads + 1) if num_kv_heads % count == 0]
    return max(count for count in counts if count == 1 or num_elements >= count * _GROUP_ELEMENTS)
