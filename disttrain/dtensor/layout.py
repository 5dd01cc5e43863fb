"""Layout: placements on a mesh. Spec: a layout plus the global tensor's shape, strides and dtype."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from disttrain.dtensor.placement import Placements, Replicate
from disttrain.dtensor.shard_sizes import contiguous_strides, local_shape_and_offset
from disttrain.mesh import DeviceMesh


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on a mesh: one placement per mesh axis. Says nothing about sizes."""

    mesh: DeviceMesh
    placements: Placements

    @property
    def is_replicated(self) -> bool:
        """True when every rank holds the whole value."""
        return all(isinstance(placement, Replicate) for placement in self.placements)

    @property
    def has_partial(self) -> bool:
        return any(placement.is_partial() for placement in self.placements)

    def with_placements(self, placements: Placements) -> Layout:
        return Layout(self.mesh, placements)

    def replicated(self) -> Layout:
        """The same mesh, whole on every rank."""
        return Layout(self.mesh, (Replicate(),) * len(self.placements))

    def __str__(self) -> str:
        return f"{list(self.placements)} on {self.mesh.layout}"


@dataclass(frozen=True)
class Spec:
    """What a DTensor is, but for its values: global shape, strides, dtype, and layout."""

    layout: Layout
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, layout: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> Spec:
        """A spec with contiguous strides."""
        return cls(layout, shape, contiguous_strides(shape), dtype)

    @property
    def mesh(self) -> DeviceMesh:
        return self.layout.mesh

    @property
    def placements(self) -> Placements:
        return self.layout.placements

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part; all zeros on a rank that is not on the mesh."""
        return self._local[0]

    @cached_property
    def local_offset(self) -> tuple[int, ...]:
        """Where this rank's part begins in the whole."""
        return self._local[1]

    @cached_property
    def _local(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            return (0,) * len(self.shape), (0,) * len(self.shape)
        return local_shape_and_offset(self.shape, self.mesh.shape, coordinate, self.placements)

    def with_layout(self, layout: Layout) -> Spec:
        return Spec(layout, self.shape, self.stride, self.dtype)
