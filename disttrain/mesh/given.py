"""Grids of ranks as callers give them: nested lists, tensors, or ranks by a rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disttrain.mesh.layout import MeshLayout
from disttrain.ranks import Ranks


def layout_of(mesh: torch.Tensor | Sequence[object], mesh_dim_names: Sequence[str] | None) -> MeshLayout:
    """The layout of the grid `mesh`."""
    names = None if mesh_dim_names is None else tuple(mesh_dim_names)
    if isinstance(mesh, Ranks):
        return MeshLayout(mesh, (len(mesh),), names)
    grid = torch.as_tensor(mesh, dtype=torch.int64, device="cpu")
    return MeshLayout(grid.flatten().tolist(), tuple(grid.shape), names)


def grid_of(layout: MeshLayout) -> torch.Tensor:
    """The ranks as an int64 tensor of the mesh's shape."""
    return torch.tensor(layout.ranks, dtype=torch.int64).view(layout.shape)
