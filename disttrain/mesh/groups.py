"""Groups as callers of `DeviceMesh.from_group` give them."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.errors import MeshError
from disttrain.process_group import ProcessGroup, World
from disttrain.process_group.current import resolve_group
from disttrain.process_group.world import NonGroupMember, world_of

_OPERATION = "DeviceMesh.from_group"


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
