"""Computes which boxes of a tensor a coordinate of a mesh holds, and which coordinates hold elements of a box. Pure
arithmetic, and torch-free.

A cut is a dim and a number of equal blocks of it, each of which is cut for itself; None for an axis that replicates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from disttrain.checkpoint.format.box import Box
from disttrain.pieces import piece, piece_size

Cut = tuple[int, int] | None
"""Dim and number of blocks."""

_Runs = list[tuple[int, int]]
"""Ranges (start, length) of one dim, in the order in which a rank has them."""


@dataclass(frozen=True)
class Part:
    """One box of the whole tensor on a rank; `origin`: where that begins in the rank's local tensor."""

    box: Box
    origin: tuple[int, ...]

    def local_slices(self) -> tuple[slice, ...]:
        return Box(self.origin, self.box.shape).slices()


def parts_of_cuts(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], cuts: Sequence[Cut]
) -> list[Part]:
    """The parts at `coordinate`: one, several where blocks are cut each for itself, or none."""
    by_dim = []
    for dim, size in enumerate(shape):
        runs = [(0, size)] if size else []
        for num_pieces, position, cut in zip(mesh_shape, coordinate, cuts, strict=True):
            if cut is not None and cut[0] == dim:
                runs = _cut(runs, cut[1], num_pieces, position)
        starts = itertools.accumulate((length for _, length in runs), initial=0)
        by_dim.append(
            [(start, length, local_start) for (start, length), local_start in zip(runs, starts, strict=False)]
        )
    return [
        Part(Box(tuple(run[0] for run in runs), tuple(run[1] for run in runs)), tuple(run[2] for run in runs))
        for runs in itertools.product(*by_dim)
    ]


def coordinates_near(
    shape: Sequence[int], mesh_shape: Sequence[int], cuts: Sequence[Cut], box: Box
) -> Iterator[tuple[int, ...]]:
    """The coordinates that hold elements of `box`, 0 along axes that replicate.

    Along an axis that cuts one run, the positions are computed; where there are several runs, all are tried.
    """

    def below(axis: int, runs_of: dict[int, _Runs], before: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if axis == len(cuts):
            yield before
            return
        cut = cuts[axis]
        if cut is None:
            yield from below(axis + 1, runs_of, (*before, 0))
            return
        dim, blocks = cut
        begin, end = box.origin[dim], box.origin[dim] + box.shape[dim]
        runs = runs_of.get(dim, [(0, shape[dim])])
        for position in _positions(runs, blocks, mesh_shape[axis], begin, end):
            remaining = _cut(runs, blocks, mesh_shape[axis], position)
            if any(start < end and begin < start + length for start, length in remaining):
                yield from below(axis + 1, {**runs_of, dim: remaining}, (*before, position))

    if 0 not in shape and 0 not in box.shape:
        yield from below(0, {}, ())


def _positions(runs: _Runs, blocks: int, num_pieces: int, begin: int, end: int) -> range:
    """Positions whose pieces may have elements from `begin` to `end`."""
    if len(runs) != 1 or blocks != 1:
        return range(num_pieces)
    start, length = runs[0]
    step = piece_size(length, num_pieces)
    first, last = max(begin - start, 0) // step, (min(end - start, length) - 1) // step
    return range(first, last + 1)


def _cut(runs: _Runs, blocks: int, num_pieces: int, position: int) -> _Runs:
    """Cuts runs (start, length) of equal blocks, each block for itself, and returns the runs of one piece."""
    if len(runs) == 1 and blocks == 1:
        start, length = runs[0]
        size, offset = piece(length, num_pieces, position)
        return [(start + offset, size)] if size else []
    block_size = sum(length for _, length in runs) // blocks
    size, offset = piece(block_size, num_pieces, position)
    remaining: _Runs = []
    for first in range(offset, offset + blocks * block_size, block_size) if size else ():
        before = 0
        for start, length in runs:
            begin, end = max(first - before, 0), min(first + size - before, length)
            before += length
            if begin >= end:
                continue
            if remaining and sum(remaining[-1]) == start + begin:
                remaining[-1] = (remaining[-1][0], remaining[-1][1] + end - begin)
            else:
                remaining.append((start + begin, end - begin))
    return remaining
