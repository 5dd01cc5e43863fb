"""Errors that only one rank raises: an index out of range, a part that does not fit into memory.

Specs are the same on all ranks, so a refusal because of them is too. But a kernel may raise because of the values or
the size of one rank's part. The other ranks would not know, and would wait in the next collective. So they are told, as
for a refused collective (docs/decisions/010-refusals-are-told.md). None of this runs without an error.
"""

from __future__ import annotations

from typing import Any

import torch

from disttrain.dtensor._torch import OpOverload, tree_leaves
from disttrain.errors import BackendError, DisttrainError
from disttrain.process_group.watching.refusals import ANY


def tell_of(error: Exception, op: OpOverload, values: Any) -> None:
    """Tells the ranks of the mesh of `values` that this rank is about to raise `error`, so that none waits for it."""
    if isinstance(error, DisttrainError) and not isinstance(error, BackendError):
        return  # decided by facts that all ranks know
    meshes = [leaf._spec.mesh for leaf in tree_leaves(values) if hasattr(leaf, "_spec") and _is_real(leaf)]
    if not meshes or meshes[0].get_coordinate() is None:
        return
    try:
        for axis, axis_size in enumerate(meshes[0].shape):
            if axis_size > 1:
                meshes[0].get_group(axis).refuse(str(op), error, ANY)
    except DisttrainError as reason:
        error.add_note(f"The other ranks could not be told: {reason}")


def _is_real(tensor: Any) -> bool:
    """False while the compiler traces, which raises for reasons of its own."""
    return type(tensor._local_tensor) is torch.Tensor
