"""Layouts as callers give them, checked: of tensors, and of the gradients of their parts."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.dtensor.spec.layout import Layout
from disttrain.dtensor.spec.placement import Partial, Placement, Placements, Replicate, normalized
from disttrain.errors import LayoutError
from disttrain.mesh import DeviceMesh, checked_mesh


def checked_layout(operation: str, mesh: DeviceMesh, placements: Sequence[Placement] | None, num_dims: int) -> Layout:
    """`placements` of a tensor of `num_dims` dims, None for all Replicate.

    Raises: LayoutError where they don't fit, MeshError for what is no mesh of ours.
    """
    mesh = checked_mesh(operation, mesh)
    try:
        return Layout(mesh, normalized(placements, mesh.ndim, num_dims))
    except ValueError as error:
        raise LayoutError(operation, f"{error}.", rank=mesh.get_rank(), where=str(mesh.layout)) from None


def gradient_placements(placements: Placements) -> Placements:
    """The placements of a tensor's gradient: a partial tensor's is whole, since every part counts in full."""
    return tuple(Replicate() if isinstance(placement, Partial) else placement for placement in placements)


def gradient_layout(operation: str, layout: Layout, placements: Sequence[Placement] | None, num_dims: int) -> Layout:
    """The layout of the gradients of a tensor's parts: `placements`, which must leave each rank the part that it has.

    Raises LayoutError where they do not.
    """
    if placements is None:
        # Most have no partial placement; to look up what they have anyway would take longer than all else here.
        return layout.with_placements(gradient_placements(layout.placements)) if layout.has_partial else layout
    wanted = checked_layout(operation, layout.mesh, placements, num_dims)
    if any(
        new != old and (new.cut_dim is not None or old.cut_dim is not None)
        for new, old in zip(wanted.placements, layout.placements, strict=True)
    ):
        raise LayoutError(
            operation,
            f"grad_placements {list(wanted.placements)} cut other dims than placements {list(layout.placements)}.",
            "The gradient of a part has its shape: give Shard where that is, else Replicate or Partial.",
            rank=layout.mesh.get_rank(),
            where=str(layout.mesh.layout),
        )
    return wanted
