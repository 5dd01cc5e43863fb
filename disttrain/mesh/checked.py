"""Meshes as callers give them, checked: torch's have the name of ours."""

from __future__ import annotations

from disttrain.errors import MeshError
from disttrain.mesh.device_mesh import DeviceMesh


def checked_mesh(operation: str, mesh: object) -> DeviceMesh:
    """`mesh`, where it is one. Raises MeshError for torch's, which has the name of ours, and for anything else."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    kind = type(mesh)
    problem = "None" if mesh is None else f"a {kind.__module__}.{kind.__qualname__}, which is none of disttrain's"
    raise MeshError(operation, f"the mesh is {problem}.", "Make it by disttrain.init_device_mesh.")


_ONE_AXIS = "Give one, such as mesh['dp'], or several flattened: mesh['dp', 'ep']._flatten()."


def checked_axis(operation: str, mesh: object, remedy: str = _ONE_AXIS) -> DeviceMesh:
    """`mesh`, where it is one of a single axis. Raises MeshError for one of more, with the remedy, and as above."""
    checked = checked_mesh(operation, mesh)
    if checked.ndim != 1:
        problem = f"the mesh {checked.layout} has {checked.ndim} axes."
        raise MeshError(operation, problem, remedy, rank=checked.get_rank())
    return checked


def axis_of_several(operation: str, axis: DeviceMesh | None) -> DeviceMesh | None:
    """As `checked_axis`; None where the axis has one rank, or there is none."""
    if axis is None:
        return None
    mesh = checked_axis(operation, axis)
    return mesh if mesh.size() > 1 else None
