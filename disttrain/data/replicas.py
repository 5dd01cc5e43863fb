"""Finds the replica that this rank belongs to: ranks of one replica read the same samples."""

from __future__ import annotations

from disttrain.errors import DataError
from disttrain.mesh import DeviceMesh, checked_mesh
from disttrain.process_group import get_rank, get_world_size, is_initialized


def replica_of(
    operation: str, mesh: DeviceMesh | None, replica: int | None, num_replicas: int | None
) -> tuple[int, int]:
    """This rank's replica, and how many there are: as given, or the rank's place on `mesh`, or in the world.

    Raises: DataError for half of it, for both ways at once, and for a rank that is not on the mesh.
    """
    if (replica is None) is not (num_replicas is None) or (mesh is not None and replica is not None):
        problem = f"mesh is {mesh}, replica is {replica}, num_replicas is {num_replicas}."
        raise DataError(operation, problem, "Give a mesh, or replica and num_replicas, or none of them.")
    if replica is not None and num_replicas is not None:
        return replica, num_replicas
    if mesh is None:
        return (get_rank(), get_world_size()) if is_initialized() else (0, 1)
    mesh = checked_mesh(operation, mesh)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise DataError(operation, "this rank is not on the mesh.", "Give a mesh that it is on.", rank=mesh.get_rank())
    number = 0
    for index, size in zip(coordinate, mesh.shape, strict=True):
        number = number * size + index
    return number, mesh.size()
