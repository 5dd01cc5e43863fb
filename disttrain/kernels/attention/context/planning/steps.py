"""Lists what a rank sends, receives and computes, step by step. Pure.

ring    one step for each rank: in step t keys come from the rank t before, while those of step t - 1 are computed
gather  one step, in which all keys come
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from disttrain.kernels.attention.context.blocks.pieces import Piece, pieces_of
from disttrain.kernels.attention.context.planning.tiles import Tiles, united

RING, GATHER, HEADS = WAYS = ("ring", "gather", "heads")
_NUM_KEPT: Final = 256

Ranges = tuple[range, ...]


class Step(NamedTuple):
    """One exchange, and what is computed with it. Ranks are those of the axis, ranges those of positions."""

    sends: tuple[tuple[int, Ranges], ...]
    """Keys of this rank that go to others."""
    receives: tuple[tuple[int, Ranges], ...]
    """Keys that come from others."""
    own: Ranges
    """Keys of this rank's that it sees itself in this step."""
    keys: Ranges
    """All keys of the step, in growing order; those that meet are one run."""
    pieces: tuple[Piece, ...]
    """Of this rank's queries and these keys."""


@lru_cache(_NUM_KEPT)
def steps_of(tiles: Tiles, rank: int, way: str) -> tuple[Step, ...]:
    """The steps of a rank; of "ring" as many on each."""
    num_ranks = tiles.parts.num_ranks
    if way == GATHER:
        others = [other for other in range(num_ranks) if other != rank]
        return (_step(tiles, rank, others, others, has_own=True),)
    first = _step(tiles, rank, [], [], has_own=True)
    later = [
        _step(tiles, rank, [(rank + number) % num_ranks], [(rank - number) % num_ranks], has_own=False)
        for number in range(1, num_ranks)
    ]
    return (first, *later)


@lru_cache(_NUM_KEPT)
def most_sent(tiles: Tiles, way: str) -> tuple[int, ...]:
    """Of each step of "ring" the most positions whose keys a rank sends: 0 where none does. Of "gather" nothing."""
    if way != RING:
        return ()
    ranks = range(tiles.parts.num_ranks)
    later = [max(tiles.num_needed((rank + number) % len(ranks), rank) for rank in ranks) for number in ranks[1:]]
    return (0, *later)


def _step(tiles: Tiles, rank: int, targets: list[int], sources: list[int], *, has_own: bool) -> Step:
    sends = ((target, tiles.needed(target, rank)) for target in targets)
    receives = ((source, tiles.needed(rank, source)) for source in sources)
    coming = tuple((source, ranges) for source, ranges in receives if ranges)
    local = tiles.needed(rank, rank) if has_own else ()
    keys = united([*local, *(run for _, ranges in coming for run in ranges)])
    pieces = pieces_of(tiles.rule, tiles.parts.ranges[rank], keys)
    return Step(tuple((target, ranges) for target, ranges in sends if ranges), coming, local, keys, pieces)
