"""The ranks that share a tensor-parallel module: a mesh of one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from disttrain.dtensor import Layout, Placement, Spec
from disttrain.errors import MeshError
from disttrain.mesh import DeviceMesh, checked_mesh
from disttrain.process_group import ProcessGroup


@dataclass(frozen=True)
class Axis:
    """One mesh axis, and this rank's place on it. Numbers and names are fields, which compilers can read."""

    mesh: DeviceMesh
    size: int
    group_name: str

    @classmethod
    def of(cls, operation: str, mesh: Any) -> Axis:
        """Raises: MeshError when `mesh` is no mesh, or has several axes."""
        mesh = checked_mesh(operation, mesh)
        if mesh.ndim == 1:
            return cls(mesh, mesh.size(), mesh.get_group().group_name)
        names = mesh.mesh_dim_names
        example = f"mesh[{names[-1]!r}]" if names else "mesh['tp'], of a mesh with mesh_dim_names"
        raise MeshError(
            operation,
            f"the mesh {mesh.layout} has {mesh.ndim} axes.",
            f"Give the one axis that modules are cut along: {example}.",
            rank=mesh.get_rank(),
        )

    def __deepcopy__(self, _: object) -> Axis:
        """Itself: copies of a module lie on the same ranks."""
        return self

    @cached_property
    def rank(self) -> int:
        """This rank's position along the axis."""
        return self.mesh.get_local_rank()

    @cached_property
    def group(self) -> ProcessGroup:
        return self.mesh.get_group()

    @cached_property
    def world_rank(self) -> int:
        """For errors."""
        return self.mesh.get_rank()

    @cached_property
    def _layouts(self) -> dict[Placement, Layout]:
        return {}

    def layout(self, placement: Placement) -> Layout:
        layout = self._layouts.get(placement)
        if layout is None:
            layout = self._layouts[placement] = Layout(self.mesh, (placement,))
        return layout

    def spec(self, placement: Placement, shape: Sequence[int], dtype: torch.dtype) -> Spec:
        """Of a contiguous tensor of global `shape` that lies so on the axis."""
        return Spec.of(self.layout(placement), shape, dtype)
