"""Cuts what some queries see of some keys into pieces that one kernel computes each. Pure.

A piece obeys only the masks that hide something of it. Most are seen whole, or are a band along the diagonal, which
fast kernels know. Bands are counted as `window_of` counts, from the last query and the last key of the piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from disttrain.kernels.attention.context.planning.tiles import Tile, found_tiles
from disttrain.kernels.attention.rules import Causal, Mask, Prefix, Rule, SlidingWindow

ALL = (-1, -1)
CAUSAL = (-1, 0)
_NUM_KEPT = 512


class Piece(NamedTuple):
    """Some queries of a rank, by their places in its order, and some of the keys at hand, by theirs."""

    queries: range
    keys: range
    band: tuple[int, int] | None
    """The keys that a query sees, as `window_of` says of as many queries as keys; None: the rule must be asked."""


@lru_cache(_NUM_KEPT)
def pieces_of(rule: Rule | None, queries: tuple[range, ...], keys: tuple[range, ...]) -> tuple[Piece, ...]:
    """The pieces of all pairs of runs; keys that meet are one run. `rule` has its tensors on the CPU."""
    return tuple(_each(rule, queries, keys))


def _each(rule: Rule | None, queries: Sequence[range], keys: Sequence[range]) -> Iterator[Piece]:
    query_shifts, key_shifts = _shifts(queries), _shifts(keys)
    for tile, query_run, key_run, hiding in found_tiles(rule, queries, keys):
        yield from _pieces_of_band(
            _shifted(tile.queries, query_shifts[query_run]),
            _shifted(tile.keys, key_shifts[key_run]),
            _band(tile, hiding),
        )


def _shifts(runs: Sequence[range]) -> list[int]:
    """The distance of the places of each run's positions, of all runs one behind the other, from the positions."""
    return [first - run.start for first, run in zip(accumulate(map(len, runs), initial=0), runs, strict=False)]


def _shifted(run: range, shift: int) -> range:
    return range(run.start + shift, run.stop + shift)


def _pieces_of_band(queries: range, keys: range, band: tuple[int, int] | None) -> Iterator[Piece]:
    """The pieces of a band that kernels count right, and as much as can be of those that more kernels know."""
    if band is None:
        yield Piece(queries, keys, None)
    elif band == CAUSAL and len(keys) > len(queries):
        first = keys.stop - len(queries)
        yield Piece(queries, range(keys.start, first), ALL)
        yield Piece(queries, range(first, keys.stop), CAUSAL)
    else:
        yield from _countable(queries, keys, *band)


def _countable(queries: range, keys: range, before: int, behind: int) -> Iterator[Piece]:
    """Pieces of whose bounds each hides something and is below the number of keys.

    FlashAttention takes a bound as large as the keys are many for none, and then, if there is another, for exactly as
    many: of more queries than keys the first would not see keys that they see.
    """
    # Counted from the last query and the last key, query i sees key j if i - behind <= j <= i + before.
    num_queries, num_keys = len(queries), len(keys)
    if behind >= num_queries - 1:
        behind = -1
    if before >= num_keys - 1:
        before = -1
    if behind >= num_keys:
        # The last queries see all keys on this side; those before them are too late for the other.
        first = queries.stop - behind
        yield from _pieces_of_band(range(queries.start, first), keys, CAUSAL)
        yield from _countable(range(first, queries.stop), keys, before, -1)
    elif before >= 0 and behind < 0 and num_queries > num_keys:
        first = queries.stop - num_keys
        yield Piece(range(queries.start, first), keys, ALL)
        yield Piece(range(first, queries.stop), keys, (before, -1))
    else:
        yield Piece(queries, keys, (before, behind))


def _band(tile: Tile, hiding: Sequence[Mask]) -> tuple[int, int] | None:
    """The band of a tile, where all that hides something of it is causal or a window, and kernels can count it."""
    before = behind = None
    # Query i and key j, counted from the ends of the tile, are i - j + distance apart.
    distance = tile.queries.stop - tile.keys.stop
    for mask in hiding:
        if isinstance(mask, Causal) or (isinstance(mask, Prefix) and _is_behind(tile.keys, mask)):
            behind = _least(behind, distance)
        elif isinstance(mask, SlidingWindow):
            before = _least(before, mask.size - 1 - distance)
            behind = _least(behind, mask.size - 1 + distance)
        else:
            return None
    if (before is not None and before < 0) or (behind is not None and behind < 0):
        # Kernels take what is below zero for no bound at all.
        return None
    return (-1 if before is None else before, -1 if behind is None else behind)


def _is_behind(keys: range, prefix: Prefix) -> bool:
    """True if the keys lie behind the prefixes of all sequences, where a query sees those before it."""
    return bool((prefix.lengths <= keys.start).all())


def _least(bound: int | None, other: int) -> int:
    return other if bound is None else min(bound, other)
