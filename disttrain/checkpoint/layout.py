"""Computes which part of a sharded tensor each rank has. Pure arithmetic, without files and tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from disttrain.checkpoint.format.box import Box
from disttrain.dtensor import Placement, Replicate, Shard, StridedShard
from disttrain.dtensor.spec.shard_sizes import num_blocks, piece


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's global shape and dtype, and how it lies on ranks.

    `cuts` has, per mesh axis, the dim that it shards, or None where it replicates; `num_blocks`, where it is not empty,
    how many equal blocks of that dim are cut each for itself. A plain tensor has no mesh: all ranks that have it hold
    all of it.
    """

    shape: tuple[int, ...]
    dtype: str
    mesh_ranks: tuple[int, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    cuts: tuple[int | None, ...] = ()
    num_blocks: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        return not self.mesh_ranks

    def is_copy_of(self, other: TensorSpec) -> bool:
        """True if the two tensors have the same layout, on meshes of different ranks."""
        lies_alike = replace(self, mesh_ranks=()) == replace(other, mesh_ranks=())
        return lies_alike and not self.is_plain and not set(self.mesh_ranks) & set(other.mesh_ranks)

    def boxes(self) -> dict[Box, tuple[int, ...]]:
        """Each part of a tensor on a mesh, and the ranks that hold it; empty parts are left out."""
        placements = [
            _placement(dim, blocks)
            for dim, blocks in zip(self.cuts, self.num_blocks or (1,) * len(self.cuts), strict=True)
        ]
        coordinates = itertools.product(*map(range, self.mesh_shape))
        holders: dict[Box, list[int]] = {}
        for rank, coordinate in zip(self.mesh_ranks, coordinates, strict=True):
            for part in parts_at(self.shape, self.mesh_shape, coordinate, placements):
                holders.setdefault(part.box, []).append(rank)
        return {box: tuple(ranks) for box, ranks in holders.items()}

    def to_plain(self) -> list[Any]:
        return [
            list(self.shape), self.dtype, list(self.mesh_ranks), list(self.mesh_shape), list(self.cuts),
            list(self.num_blocks),
        ]  # fmt: skip

    @classmethod
    def from_plain(cls, plain: list[Any]) -> TensorSpec:
        shape, dtype, ranks, mesh_shape, cuts, blocks = plain
        return cls(tuple(shape), dtype, tuple(ranks), tuple(mesh_shape), tuple(cuts), tuple(blocks))


def _placement(dim: int | None, blocks: int) -> Placement:
    if dim is None:
        return Replicate()
    return Shard(dim) if blocks == 1 else StridedShard(dim, blocks)


@dataclass(frozen=True)
class Part:
    """One box of the whole tensor on a rank; `origin`: where that begins in the rank's local tensor."""

    box: Box
    origin: tuple[int, ...]

    def local_slices(self) -> tuple[slice, ...]:
        return Box(self.origin, self.box.shape).slices()


def parts_at(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> list[Part]:
    """The parts of the rank at `coordinate`: one, several where blocks are cut each for itself, or none."""
    cuts = list(zip(mesh_shape, coordinate, placements, strict=True))
    by_dim = []
    for dim, size in enumerate(shape):
        runs = [(0, size)] if size else []
        for num_pieces, position, placement in cuts:
            if placement.cut_dim == dim:
                runs = _cut(runs, num_blocks(placement), num_pieces, position)
        starts = itertools.accumulate((length for _, length in runs), initial=0)
        by_dim.append(
            [(start, length, local_start) for (start, length), local_start in zip(runs, starts, strict=False)]
        )
    return [
        Part(Box(tuple(run[0] for run in runs), tuple(run[1] for run in runs)), tuple(run[2] for run in runs))
        for runs in itertools.product(*by_dim)
    ]


def _cut(runs: list[tuple[int, int]], blocks: int, num_pieces: int, position: int) -> list[tuple[int, int]]:
    """Cuts runs (start, length) of equal blocks, each block for itself, and returns the runs of one piece."""
    block_size = sum(length for _, length in runs) // blocks
    size, offset = piece(block_size, num_pieces, position)
    remaining: list[tuple[int, int]] = []
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
