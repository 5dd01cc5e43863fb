"""Takes axes out of a mesh that contains them: a mesh `fsdp` of 8 ranks beside an axis `ep` of 4 of these leaves 2."""

from __future__ import annotations

import math
from collections.abc import Sequence

from disttrain.mesh.device_mesh import DeviceMesh
from disttrain.mesh.layout import MeshLayout
from disttrain.ranks import Loop, Ranks


def without(mesh: DeviceMesh, other: DeviceMesh, axes: Sequence[int]) -> tuple[DeviceMesh, int]:
    """Returns `mesh` without those of `axes` of `other` that lie within it, and the number of ranks along these.

    An axis of which nothing is left has this rank alone. The mesh itself, and 1, where nothing lies within it.
    """
    if mesh.mesh_dim_names is None or mesh.get_coordinate() is None or other.get_coordinate() is None:
        return mesh, 1
    rank, num_taken = mesh.get_rank(), 1
    inner = [other.layout.along(rank, [axis]).members for axis in axes if other.shape[axis] > 1]
    left: DeviceMesh | None = None
    for name in mesh.mesh_dim_names:
        axis = mesh[name]
        loops, first = _left_over(axis.layout.members, inner, rank)
        num_left = math.prod(size for size, _ in loops)
        if num_left != axis.size():
            num_taken *= axis.size() // num_left
            axis = _axis_of(mesh, name, axis.layout.members.at(Ranks.grid(first, loops)))
        left = axis if left is None else left.joined_with(axis)
        if left is None:
            return mesh, 1
    assert left is not None
    if num_taken == 1:
        return mesh, 1
    left.root = mesh.root  # Else a mesh of joined axes would be its own, and joined with no other slice.
    return left, num_taken


def _left_over(members: Ranks, inner: Sequence[Ranks], rank: int) -> tuple[list[Loop], int]:
    """The loops over positions in `members` that go on where all `inner` ones stand still, and their first position."""
    position = members.position(rank) or 0
    taken: list[Loop] = []
    for each in inner:
        positions = members.positions(each)
        loops = None if positions is None else positions.loops
        if loops is not None and positions == Ranks.grid(position - _within(position, loops), loops):
            taken += loops
    left, step = [], 1
    for size, stride in sorted(taken, key=lambda loop: loop[1]):
        if stride % step or len(members) % (size * stride):
            return [(len(members), 1)], 0  # They are no axes of one grid.
        left.append((stride // step, step))
        step = stride * size
    left.append((len(members) // step, step))
    loops = tuple(loop for loop in reversed(left) if loop[0] > 1)
    return [*loops], position - _within(position, loops)


def _within(position: int, loops: Sequence[Loop]) -> int:
    """The steps that the loops have gone at a position."""
    return sum(position // stride % size * stride for size, stride in loops if stride > 0)


def _axis_of(mesh: DeviceMesh, name: str, members: Ranks) -> DeviceMesh:
    """The axis of the mesh's root that has these ranks, or a new one that is named by those that it is made of."""
    rank, root = mesh.get_rank(), mesh.root
    names = []
    for other in root.mesh_dim_names or ():
        axis = root.layout.along(rank, [root.layout.axis(other)])
        if axis.members == members and len(members) > 1:
            return root[other]
        if len(axis.members) > 1 and members.positions(axis.members) is not None:
            names.append(other)
    layout = MeshLayout(members, (len(members),), ("_".join(names) or f"rest_of_{name}",))
    return DeviceMesh._of(mesh.world, mesh.device_type, layout, root)
