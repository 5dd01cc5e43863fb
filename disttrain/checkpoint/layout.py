"""Describes how a rank's tensors lie: shape, dtype, mesh and cuts. Without files and tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.parts import Cut, Part, parts_of_cuts
from disttrain.dtensor import Placement
from disttrain.dtensor.spec.shard_sizes import num_blocks
from disttrain.ranks import Ranks


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's global shape and dtype, and how it lies on ranks.

    `mesh_ranks` are a range where they can be. `cuts` has, per mesh axis, the dim that it shards, or None where it
    replicates; `num_blocks`, where it is not empty, how many equal blocks of that dim are cut each for itself. A plain
    tensor has no mesh: all ranks that have it hold all of it.
    """

    shape: tuple[int, ...]
    dtype: str
    mesh_ranks: tuple[int, ...] | range = ()
    mesh_shape: tuple[int, ...] = ()
    cuts: tuple[int | None, ...] = ()
    num_blocks: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        return not self.mesh_ranks

    @property
    def axis_cuts(self) -> tuple[Cut, ...]:
        """Dim and number of blocks per mesh axis."""
        blocks = self.num_blocks or (1,) * len(self.cuts)
        return tuple(None if dim is None else (dim, count) for dim, count in zip(self.cuts, blocks, strict=True))

    def lies_as(self, other: TensorSpec) -> bool:
        """True if the two tensors have the same layout, on whichever meshes."""
        return not self.is_plain and not other.is_plain and replace(self, mesh_ranks=other.mesh_ranks) == other

    def boxes(self) -> dict[Box, tuple[int, ...]]:
        """Each part of a tensor on a mesh, and the ranks that hold it; empty parts are left out. Lists all ranks."""
        coordinates = itertools.product(*map(range, self.mesh_shape))
        holders: dict[Box, list[int]] = {}
        for rank, coordinate in zip(self.mesh_ranks, coordinates, strict=True):
            for part in parts_of_cuts(self.shape, self.mesh_shape, coordinate, self.axis_cuts):
                holders.setdefault(part.box, []).append(rank)
        return {box: tuple(ranks) for box, ranks in holders.items()}


def parts_at(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> list[Part]:
    """The parts of the rank at `coordinate`: one, several where blocks are cut each for itself, or none."""
    cuts = [None if (dim := placement.cut_dim) is None else (dim, num_blocks(placement)) for placement in placements]
    return parts_of_cuts(shape, mesh_shape, coordinate, cuts)


def compact(ranks: Sequence[int]) -> tuple[int, ...] | range:
    """The same ranks, as a range where they are one; those by a rule of one loop are not listed."""
    if isinstance(ranks, range):
        return ranks
    if isinstance(ranks, Ranks):
        match ranks.loops:
            case ((size, step),) if step > 0:
                return range(ranks[0], ranks[0] + size * step, step)
        return _listed(ranks)
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    as_range = range(ranks[0], ranks[0] + len(ranks) * step, step) if step > 0 else range(0)
    return as_range if tuple(as_range) == tuple(ranks) else tuple(ranks)


@lru_cache(maxsize=64)
def _listed(ranks: Ranks) -> tuple[int, ...] | range:
    """Once for all tensors of a mesh."""
    return compact(ranks.listed)
