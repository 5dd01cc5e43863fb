"""Slices of a sharded dim, sharded again: which rank holds which of their elements, and which gets them. Planned from
sizes only.

`Exchange` gives every rank its pieces of some slices of a dim that is sharded along one axis, and takes them back.
`Broadcast` gives every rank one element of that dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from disttrain.dtensor.redistribute.transfers import broadcast, exchange
from disttrain.dtensor.spec.index_range import IndexRange
from disttrain.dtensor.spec.layout import Spec
from disttrain.dtensor.spec.placement import Shard
from disttrain.mesh import DeviceMesh
from disttrain.pieces import piece


def sole_axis(spec: Spec, dim: int) -> int | None:
    """The one mesh axis that cuts `dim`, where it is only one and leaves consecutive pieces; None otherwise."""
    axes = [axis for axis, placement in enumerate(spec.placements) if placement.cut_dim == dim]
    return axes[0] if len(axes) == 1 and spec.placements[axes[0]] == Shard(dim) else None


@dataclass(frozen=True)
class _Run:
    """Elements that go from one rank to another: their indices in the source's part, and the first index in the
    target's."""

    source: IndexRange
    target: int


class Exchange:
    """Slices `slices` of `dim`, which has `size` elements and is sharded along `axis`, each sharded along that axis.

    What a rank gets lies in one tensor, its piece of the first slice in front; `sizes` are the pieces' sizes.
    """

    def __init__(self, mesh: DeviceMesh, axis: int, dim: int, size: int, slices: Sequence[IndexRange]) -> None:
        self.mesh, self.axis, self.dim = mesh, axis, dim
        num_pieces, position = mesh.shape[axis], mesh.get_local_rank(axis)
        self._outgoing = [_runs(size, slices, num_pieces, position, peer) for peer in range(num_pieces)]
        self._incoming = [_runs(size, slices, num_pieces, peer, position) for peer in range(num_pieces)]
        self.sizes = [piece(slice_.length, num_pieces, position)[0] for slice_ in slices]
        self.own = [run.source for run in _runs(size, slices, num_pieces, position, position, keeps_empty=True)]
        """The indices, in this rank's part, of its elements of each slice, for slices that do not move."""
        self.is_local = all(
            run.source.length == piece(slice_.length, num_pieces, rank)[0]
            for rank in range(num_pieces)
            for run, slice_ in zip(_runs(size, slices, num_pieces, rank, rank, keeps_empty=True), slices, strict=True)
        )
        """True when every rank has its pieces already."""

    def read(self, part: torch.Tensor) -> torch.Tensor:
        sent = [self._packed([elements(part, self.dim, run.source) for run in runs], part) for runs in self._outgoing]
        shapes = [self._shape(part, _num_elements(runs)) for runs in self._incoming]
        received = exchange(sent, shapes, self.mesh.get_group(self.axis))
        moved = part.new_empty(self._shape(part, sum(self.sizes)))
        for runs, values in zip(self._incoming, received, strict=True):
            for run, piece_ in zip(runs, values.split([run.source.length for run in runs], self.dim), strict=True):
                moved.narrow(self.dim, run.target, run.source.length).copy_(piece_)
        return moved

    def write(self, moved: torch.Tensor, part: torch.Tensor) -> None:
        sent = [
            self._packed([moved.narrow(self.dim, run.target, run.source.length) for run in runs], moved)
            for runs in self._incoming
        ]
        shapes = [self._shape(moved, _num_elements(runs)) for runs in self._outgoing]
        received = exchange(sent, shapes, self.mesh.get_group(self.axis))
        for runs, values in zip(self._outgoing, received, strict=True):
            for run, piece_ in zip(runs, values.split([run.source.length for run in runs], self.dim), strict=True):
                elements(part, self.dim, run.source).copy_(piece_)

    def _packed(self, pieces: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        if not pieces:
            return like.new_empty(self._shape(like, 0))
        return torch.cat(pieces, self.dim).contiguous() if len(pieces) > 1 else pieces[0].contiguous()

    def _shape(self, like: torch.Tensor, size: int) -> list[int]:
        return [*like.shape[: self.dim], size, *like.shape[self.dim + 1 :]]


@dataclass(frozen=True)
class Broadcast:
    """Element `index` of `dim`, which has `size` elements and is sharded along `axis`, for all ranks of the axis."""

    mesh: DeviceMesh
    axis: int
    dim: int
    size: int
    index: int

    def read(self, part: torch.Tensor) -> torch.Tensor:
        owner, offset = self._owner()
        if self.mesh.get_local_rank(self.axis) == owner:
            values = part.select(self.dim, offset).clone(memory_format=torch.contiguous_format)
        else:
            values = part.new_empty([*part.shape[: self.dim], *part.shape[self.dim + 1 :]])
        return broadcast(values, owner, self.mesh.get_group(self.axis))

    def write(self, moved: torch.Tensor, part: torch.Tensor) -> None:
        owner, offset = self._owner()
        if self.mesh.get_local_rank(self.axis) == owner:
            part.select(self.dim, offset).copy_(moved)

    def _owner(self) -> tuple[int, int]:
        """The rank along the axis that has the element, and where in its part."""
        return divmod(self.index, piece(self.size, self.mesh.shape[self.axis], 0)[0])


def _runs(
    size: int, slices: Sequence[IndexRange], num_pieces: int, source: int, target: int, *, keeps_empty: bool = False
) -> list[_Run]:
    """The elements that `source` holds of the pieces of `slices` that `target` gets."""
    held_length, begin = piece(size, num_pieces, source)
    runs = []
    target_begin = 0
    for slice_ in slices:
        length, offset = piece(slice_.length, num_pieces, target)
        wanted = slice_.between(offset, offset + length)
        first = wanted.num_below(begin)
        last = wanted.num_below(begin + held_length)
        if last > first or keeps_empty:
            runs.append(_Run(wanted.between(first, last).less(begin), target_begin + first))
        target_begin += length
    return runs


def _num_elements(runs: Sequence[_Run]) -> int:
    return sum(run.source.length for run in runs)


def elements(part: torch.Tensor, dim: int, places: IndexRange) -> torch.Tensor:
    """A view of the elements at `places` of `dim`."""
    if places.length == 0:
        return part.narrow(dim, 0, 0)
    return part[(slice(None),) * dim + (slice(places.start, places.end, places.step),)]
