"""Grids of ranks, and groups, as callers give them: nested lists, tensors, ranks by a rule; groups of torch's too."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disttrain.errors import MeshError
from disttrain.mesh.layout import MeshLayout
from disttrain.process_group import ProcessGroup, World
from disttrain.process_group.current import resolve_group
from disttrain.process_group.world import NonGroupMember, world_of
from disttrain.ranks import Ranks

_OPERATION = "DeviceMesh.from_group"


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


def given_groups(group: object) -> tuple[World, tuple[ProcessGroup, ...]]:
    """The groups, of which those of torch's that stand for ours are ours, and their world.

    Raises MeshError for none, GroupError for others.
    """
    groups = tuple(group) if isinstance(group, Sequence) else (group,)
    if not groups or any(isinstance(group, NonGroupMember) for group in groups):
        problem = "a group was given that this rank is not in." if groups else "no group was given."
        raise MeshError(_OPERATION, problem, "Give groups of this rank, one for each axis.")
    ours = tuple(resolve_group(_OPERATION, group) for group in groups)
    return world_of(ours[0]), ours
