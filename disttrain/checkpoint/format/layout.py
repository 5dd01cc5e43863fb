"""Layouts: the ranks of one or several meshes, and which dims their axes cut. Pure arithmetic, and torch-free.

A layout is described once for all tensors that lie so. Nothing here lists the ranks of a mesh: they are ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.parts import Cut, coordinates_near, parts_of_cuts

Runs = tuple[range, ...]
"""Ranks in order, as ranges one after the other."""


def runs_of(ranks: Sequence[int]) -> Runs:
    """The same ranks as few ranges."""
    if isinstance(ranks, range):
        return (ranks,)
    ranges: list[range] = []
    at = 0
    while at < len(ranks):
        start = ranks[at]
        step = ranks[at + 1] - start if at + 1 < len(ranks) else 1
        count = 1
        while step > 0 and at + count < len(ranks) and ranks[at + count] == start + count * step:
            count += 1
        ranges.append(range(start, start + count * max(step, 1), max(step, 1)))
        at += count
    return tuple(ranges)


def num_ranks(runs: Runs) -> int:
    return sum(map(len, runs))


def rank_at(runs: Runs, index: int) -> int:
    for run in runs:
        if index < len(run):
            return run[index]
        index -= len(run)
    raise IndexError(index)


def index_of(runs: Runs, rank: int) -> int | None:
    """The index of a rank; None where it is not among them."""
    before = 0
    for run in runs:
        if rank in run:
            return before + run.index(rank)
        before += len(run)
    return None


def runs_to_plain(runs: Runs) -> list[list[int]]:
    """[first, count, step] of each."""
    return [[run.start, len(run), run.step] for run in runs]


def runs_from_plain(plain: Iterable[Sequence[int]]) -> Runs:
    return tuple(range(first, first + count * step, step) for first, count, step in plain)


@dataclass(frozen=True)
class Layout:
    """Meshes of one shape, which lie alike, and per mesh axis the cut.

    A part of a tensor is held by all ranks that differ only along axes that replicate, and by those of the other
    meshes: its holders, in this order.
    """

    meshes: tuple[Runs, ...]
    mesh_shape: tuple[int, ...]
    cuts: tuple[Cut, ...]

    @classmethod
    def replicated(cls, ranks: Sequence[int]) -> Layout:
        """The layout of what all these ranks hold as a whole."""
        return cls((runs_of(ranks),), (len(ranks),), (None,))

    @cached_property
    def num_parts(self) -> int:
        """The number of coordinates that hold different parts."""
        return math.prod(size for size, cut in zip(self.mesh_shape, self.cuts, strict=True) if cut is not None)

    @cached_property
    def _replicated_shape(self) -> tuple[int, ...]:
        return tuple(size for size, cut in zip(self.mesh_shape, self.cuts, strict=True) if cut is None)

    @property
    def num_holders(self) -> int:
        """The number of ranks that hold each part."""
        return math.prod(self._replicated_shape) * len(self.meshes)

    def find(self, rank: int) -> tuple[tuple[int, ...], int] | None:
        """A rank's coordinate and which of the holders of its parts it is; None where it is not on the meshes."""
        for number, mesh in enumerate(self.meshes):
            index = index_of(mesh, rank)
            if index is not None:
                coordinate = _unravelled(index, self.mesh_shape)
                position = number
                for coord, size, cut in zip(coordinate, self.mesh_shape, self.cuts, strict=True):
                    position = position * size + coord if cut is None else position
                return coordinate, position
        return None

    def holder(self, coordinate: Sequence[int], position: int) -> int:
        """The rank at a position among the holders of the parts at `coordinate`."""
        number, replica = divmod(position, self.num_holders // len(self.meshes))
        replicas = iter(_unravelled(replica, self._replicated_shape))
        index = 0
        for coord, size, cut in zip(coordinate, self.mesh_shape, self.cuts, strict=True):
            index = index * size + (next(replicas) if cut is None else coord)
        return rank_at(self.meshes[number], index)

    def holders(self, coordinate: Sequence[int]) -> list[int]:
        """The ranks that hold the parts at `coordinate`, in order."""
        return [self.holder(coordinate, position) for position in range(self.num_holders)]

    def boxes_at(self, shape: Sequence[int], coordinate: Sequence[int]) -> list[Box]:
        """The boxes of a tensor of this shape at `coordinate`; none of them is empty."""
        return [part.box for part in parts_of_cuts(shape, self.mesh_shape, coordinate, self.cuts)]

    def coordinates_near(self, shape: Sequence[int], box: Box) -> Iterator[tuple[int, ...]]:
        """The coordinates that hold elements of `box`, 0 along axes that replicate."""
        return coordinates_near(shape, self.mesh_shape, self.cuts, box)

    def to_plain(self) -> dict[str, Any]:
        return {
            "meshes": [runs_to_plain(mesh) for mesh in self.meshes],
            "mesh_shape": list(self.mesh_shape),
            "cuts": [None if cut is None else list(cut) for cut in self.cuts],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Layout:
        return cls(
            tuple(runs_from_plain(mesh) for mesh in plain["meshes"]),
            tuple(plain["mesh_shape"]),
            tuple(None if cut is None else (cut[0], cut[1]) for cut in plain["cuts"]),
        )


def _unravelled(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    coordinate = []
    for size in reversed(shape):
        index, position = divmod(index, size)
        coordinate.append(position)
    return tuple(reversed(coordinate))
