"""Lists which queries of a rank see which keys of another, under a rule: what must be sent, and computed. Pure.

A rule tells of blocks of positions from their ends alone, so that nothing of queries times keys is needed. Rules are
those of the whole sequence, with their tensors on the CPU (`on_host`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from disttrain.kernels.attention.context.parts import Parts
from disttrain.kernels.attention.rules import BLOCK_SIZE, Blocks, Documents, Mask, Prefix, Rule, Rules, masks_of

_NUM_KEPT = 64


class Tile(NamedTuple):
    """A run of queries and a run of keys, by positions in the whole, of which some query sees some key."""

    queries: range
    keys: range
    sees_all: bool
    """Every query sees every key."""


@dataclass(frozen=True)
class Tiles:
    """What the queries of each rank see of the keys of each rank."""

    parts: Parts
    rule: Rule | None
    """With its tensors on the CPU."""

    def of(self, rank: int, source: int) -> tuple[Tile, ...]:
        """Tiles of a rank's queries and the keys of `source`, by queries, then by keys. They do not overlap."""
        return _tiles(self, rank, source)

    def needed(self, rank: int, source: int) -> tuple[range, ...]:
        """The keys of `source` that some query of `rank` sees: in growing order, apart from each other."""
        return united([tile.keys for tile in self.of(rank, source)])

    def num_needed(self, rank: int, source: int) -> int:
        return sum(map(len, self.needed(rank, source)))

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Of each rank, the number of pairs of a query and a key that it sees; those of blocks that are seen in part
        count half."""
        return tuple(
            sum(
                _seen_area(self.rule, queries, keys)
                for queries in ranges
                for source in self.parts.ranges
                for keys in source
            )
            for ranges in self.parts.ranges
        )

    @property
    def imbalance(self) -> float:
        """How much more than the mean the rank with most work has: 0.02 for 2 %."""
        total = sum(self.work)
        return max(self.work) * len(self.work) / total - 1 if total else 0.0


def on_host(rule: Rule | None) -> Rule | None:
    """The rule with the tensors of its masks on the CPU; itself where they are, since caches go by identity."""
    if rule is None:
        return None
    masks = [_on_host(mask) for mask in masks_of(rule)]
    if not masks:
        return None
    return masks[0] if len(masks) == 1 else Rules(tuple(masks))


@lru_cache(_NUM_KEPT)
def _on_host(mask: Mask) -> Mask:
    if isinstance(mask, Documents):
        return mask if mask.ids.device.type == "cpu" else Documents(mask.ids.cpu())
    if isinstance(mask, Prefix):
        return mask if mask.lengths.device.type == "cpu" else Prefix(mask.lengths.cpu())
    return mask


@lru_cache(_NUM_KEPT)
def tiles_of(parts: Parts, rule: Rule | None) -> Tiles:
    """The tiles of a rule, kept for the next layers."""
    return Tiles(parts, on_host(rule))


@lru_cache(64 * _NUM_KEPT)
def _tiles(tiles: Tiles, rank: int, source: int) -> tuple[Tile, ...]:
    parts = tiles.parts
    return tuple(
        tile
        for queries in parts.ranges[rank]
        for keys in parts.ranges[source]
        for tile in tiles_of_ranges(tiles.rule, queries, keys)
    )


def tiles_of_ranges(rule: Rule | None, queries: range, keys: range) -> Iterator[Tile]:
    """For each run of blocks of keys that some of the queries see: these, and the queries from the first to the last
    that see one."""
    if rule is None:
        yield Tile(queries, keys, True)
        return
    query_starts, key_starts = _starts(queries), _starts(keys)
    some, every = _seen_blocks(rule, queries, keys)
    for columns in _runs(some.any(0).tolist()):
        rows = [*_runs(some[:, columns.start : columns.stop].any(1).tolist())]
        taken = range(rows[0].start, rows[-1].stop)
        sees_all = bool(every[taken.start : taken.stop, columns.start : columns.stop].all())
        yield Tile(_positions(query_starts, queries, taken), _positions(key_starts, keys, columns), sees_all)


def _seen_blocks(rule: Rule | None, queries: range, keys: range) -> tuple[torch.Tensor, torch.Tensor]:
    """(blocks of queries, blocks of keys): where some sequence's queries may see a key, where all see all."""
    (first_query, last_query), (first_key, last_key) = _ends(queries), _ends(keys)
    blocks = Blocks(first_query[:, None], last_query[:, None], first_key[None], last_key[None])
    some = every = torch.ones(len(first_query), len(first_key), dtype=torch.bool)
    for mask in masks_of(rule):
        maybe, surely = mask.sees_blocks(blocks)
        some, every = some & maybe, every & surely
    if some.dim() > 2:
        # Sequences of a batch that see different keys are computed together.
        some, every = some.flatten(0, -3).any(0), every.flatten(0, -3).all(0)
    return some, every


def seen_by_all(mask: Mask, queries: range, keys: range) -> bool:
    """True if the mask hides none of the keys from any of the queries, as far as whole blocks tell."""
    _, every = _seen_blocks(mask, queries, keys)
    return bool(every.all())


def _seen_area(rule: Rule | None, queries: range, keys: range) -> float:
    if rule is None:
        return float(len(queries) * len(keys))
    some, every = _seen_blocks(rule, queries, keys)
    (first_query, last_query), (first_key, last_key) = _ends(queries), _ends(keys)
    weight = (some.double() + every.double()) / 2
    heights, widths = (last_query - first_query + 1).double(), (last_key - first_key + 1).double()
    return float(heights @ weight @ widths)


def _starts(run: range) -> Sequence[int]:
    return range(run.start, run.stop, BLOCK_SIZE)


def _ends(run: range) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last position of each block of a run."""
    first = torch.arange(run.start, run.stop, BLOCK_SIZE)
    return first, (first + BLOCK_SIZE - 1).clamp(max=run.stop - 1)


def _positions(starts: Sequence[int], run: range, blocks: range) -> range:
    stop = starts[blocks.stop] if blocks.stop < len(starts) else run.stop
    return range(starts[blocks.start], stop)


def _runs(marks: Sequence[bool]) -> Iterator[range]:
    """The runs of true marks."""
    start = None
    for index, mark in enumerate([*marks, False]):
        if mark and start is None:
            start = index
        elif not mark and start is not None:
            yield range(start, index)
            start = None


def united(ranges: Sequence[range]) -> tuple[range, ...]:
    """The same positions, in growing order; runs that meet or overlap are one."""
    runs: list[range] = []
    for run in sorted(ranges, key=lambda each: (each.start, each.stop)):
        if runs and run.start <= runs[-1].stop:
            runs[-1] = range(runs[-1].start, max(runs[-1].stop, run.stop))
        else:
            runs.append(run)
    return tuple(runs)
