"""Lists which queries of a rank see which keys of another, under a rule: what must be sent, and computed. Pure.

A rule tells of blocks of positions from their ends alone, so that nothing of queries times keys is needed. Rules are
those of the whole sequence, with their tensors on the CPU (`on_host`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from disttrain.kernels.attention.context.parts import Parts, positions_of
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
    """The tiles that the queries of each rank see of the keys of each rank."""

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
        everything = [keys for ranges in self.parts.ranges for keys in ranges]
        return tuple(_seen_area(self.rule, queries, everything) for queries in self.parts.ranges)

    @property
    def imbalance(self) -> float:
        """The excess over the mean of the rank with most work: 0.02 for 2 %."""
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
    runs = found_tiles(tiles.rule, tiles.parts.ranges[rank], tiles.parts.ranges[source])
    return tuple(each.tile for each in runs)


class FoundTile(NamedTuple):
    """A tile, the numbers of the runs that it lies in, and the masks that hide something of it."""

    tile: Tile
    query_run: int
    key_run: int
    hiding: tuple[Mask, ...]


def found_tiles(rule: Rule | None, queries: Sequence[range], keys: Sequence[range]) -> Iterator[FoundTile]:
    """Finds, in each run of queries and of keys, the runs of blocks of keys that some queries see, with the queries
    from the first to the last that see one."""
    masks = masks_of(rule)
    rows, columns = _Blocks.of(queries), _Blocks.of(keys)
    some, every = _seen_blocks(masks, rows, columns)
    for query_run, key_run in _pairs_of_runs(some, rows, columns):
        first_row, first_column = rows.firsts[query_run], columns.firsts[key_run]
        block = (
            slice(first_row, rows.firsts[query_run + 1]),
            slice(first_column, columns.firsts[key_run + 1]),
        )
        seen = some[block]
        for taken_columns in _runs(np.logical_or.reduce(seen, 0).tolist()):
            taken_rows = [*_runs(np.logical_or.reduce(seen[:, taken_columns.start : taken_columns.stop], 1).tolist())]
            taken = range(taken_rows[0].start, taken_rows[-1].stop)
            part = (
                slice(first_row + taken.start, first_row + taken.stop),
                slice(first_column + taken_columns.start, first_column + taken_columns.stop),
            )
            hiding = tuple(mask for mask, table in zip(masks, every, strict=True) if not table[part].all())
            tile = Tile(_positions(queries[query_run], taken), _positions(keys[key_run], taken_columns), not hiding)
            yield FoundTile(tile, query_run, key_run, hiding)


class _Blocks(NamedTuple):
    """The blocks of some runs of positions, one behind the other."""

    first: torch.Tensor
    last: torch.Tensor
    firsts: list[int]
    """The number of the first block of each run, and of all blocks."""

    @classmethod
    def of(cls, runs: Sequence[range]) -> _Blocks:
        first = positions_of([range(run.start, run.stop, BLOCK_SIZE) for run in runs])
        counts = [len(range(run.start, run.stop, BLOCK_SIZE)) for run in runs]
        stops = torch.tensor([run.stop for run in runs], dtype=torch.int64)
        ends = stops.repeat_interleave(torch.tensor(counts, dtype=torch.int64)) - 1
        return cls(first, torch.minimum(first + BLOCK_SIZE - 1, ends), [0, *accumulate(counts)])

    @property
    def sizes(self) -> torch.Tensor:
        return (self.last - self.first + 1).double()


def _seen_blocks(
    masks: Sequence[Mask], rows: _Blocks, columns: _Blocks
) -> tuple[NDArray[np.bool_], list[NDArray[np.bool_]]]:
    """(blocks of queries, blocks of keys): where some sequence's queries may see a key; by mask, where all see all."""
    blocks = Blocks(rows.first[:, None], rows.last[:, None], columns.first[None], columns.last[None])
    some = torch.ones(len(rows.first), len(columns.first), dtype=torch.bool)
    every = []
    for mask in masks:
        maybe, surely = mask.sees_blocks(blocks)
        some = some & maybe
        every.append((surely.flatten(0, -3).all(0) if surely.dim() > 2 else surely).expand(some.shape[-2:]).numpy())
    if some.dim() > 2:
        # Sequences of a batch that see different keys are computed together.
        some = some.flatten(0, -3).any(0)
    return some.numpy(), every


def _pairs_of_runs(some: NDArray[np.bool_], rows: _Blocks, columns: _Blocks) -> Iterator[tuple[int, int]]:
    """The runs of queries and of keys that have something to do with each other."""
    if not some.size:
        return
    by_runs = np.logical_or.reduceat(np.logical_or.reduceat(some, rows.firsts[:-1], 0), columns.firsts[:-1], 1)
    yield from zip(*map(np.ndarray.tolist, by_runs.nonzero()), strict=True)


def _seen_area(rule: Rule | None, queries: Sequence[range], keys: Sequence[range]) -> float:
    rows, columns = _Blocks.of(queries), _Blocks.of(keys)
    some, every = _seen_blocks(masks_of(rule), rows, columns)
    all_see = np.logical_and.reduce([np.ones_like(some), *every]) & some
    weight = torch.from_numpy(some).double().add_(torch.from_numpy(all_see)).div_(2)
    return float(rows.sizes @ weight @ columns.sizes)


def _positions(run: range, blocks: range) -> range:
    """Where some blocks of a run are."""
    start = run.start + blocks.start * BLOCK_SIZE
    return range(start, min(run.start + blocks.stop * BLOCK_SIZE, run.stop))


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
