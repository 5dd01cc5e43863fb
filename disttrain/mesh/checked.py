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


def checked_axis(operation: str, axis: DeviceMesh | None) -> DeviceMesh | None:
    """A mesh of one axis, as it is given; None where it has one rank, or there is none.

    Raises: MeshError for a mesh of more axes, or something else.
    """
    if axis is None:
        return None
    mesh = checked_mesh(operation, axis)
    if mesh.ndim != 1:
        raise MeshError(
            operation,
            f"the mesh has {mesh.ndim} axes, {mesh.mesh_dim_names or mesh.shape}.",
            "Give one, such as mesh['dp'], or several flattened: mesh['dp', 'ep']._flatten().",
            rank=mesh.get_rank(),
        )
    return mesh if mesh.size() > 1 else None
