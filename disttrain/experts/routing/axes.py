"""The mesh axes over which ranks route together."""

from __future__ import annotations

import torch

from disttrain.mesh import DeviceMesh
from disttrain.mesh import checked_axis as mesh_of_one
from disttrain.process_group.functional import all_reduce, wait_tensor


def checked_axis(operation: str, axis: DeviceMesh | None) -> DeviceMesh | None:
    """A mesh of one axis, as it is given; None where it has one rank, or there is none.

    Raises: MeshError for a mesh of more axes, or something else.
    """
    if axis is None:
        return None
    remedy = "Give one, such as mesh['dp'], or several flattened: mesh['dp', 'ep']._flatten()."
    mesh = mesh_of_one(operation, axis, remedy)
    return mesh if mesh.size() > 1 else None


@torch.no_grad()
def summed(numbers: torch.Tensor, axis: DeviceMesh | None) -> torch.Tensor:
    """`numbers` of all ranks of the axis together. Collective: every rank of it."""
    return numbers if axis is None else wait_tensor(all_reduce(numbers, "sum", axis))
