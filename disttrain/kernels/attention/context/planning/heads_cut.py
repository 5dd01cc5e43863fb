"""Which heads each rank has when heads are exchanged for positions. Pure."""

from __future__ import annotations


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
