"""DTensors from whole tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disttrain.dtensor._torch import as_one_call
from disttrain.dtensor.dtensor import DTensor
from disttrain.dtensor.foreign import check_ours
from disttrain.dtensor.redistribute.local import redistribute_local
from disttrain.dtensor.redistribute.transfers import broadcast
from disttrain.dtensor.spec.checked_layouts import checked_layout
from disttrain.dtensor.spec.layout import Spec
from disttrain.dtensor.spec.placement import Partial, Placement
from disttrain.errors import LayoutError
from disttrain.mesh import DeviceMesh


@as_one_call
def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Lay out a whole tensor on a mesh; each rank keeps its part.

    Args:    tensor         the whole, on every rank; moved to the mesh's device.
             placements     one per mesh axis, Shard or Replicate; default Replicate.
             src_data_rank  the mesh position (0: the first along every axis) whose values count; None: each rank's own
                            are known to be equal, and nothing is sent.
    Returns: a leaf that requires a gradient if `tensor` does.
    Collective: every rank of the mesh, unless src_data_rank is None or the tensor is on the meta device.
    """
    check_ours("distribute_tensor", "the tensor", tensor)
    layout = checked_layout("distribute_tensor", device_mesh, placements, tensor.ndim)
    if any(isinstance(placement, Partial) for placement in layout.placements):
        raise LayoutError(
            "distribute_tensor",
            f"placements {layout.placements} include Partial, of which a whole tensor has no parts.",
            "Use Shard or Replicate, or DTensor.from_local with each rank's part.",
            rank=device_mesh.get_rank(),
        )
    whole = tensor.detach().resolve_conj().resolve_neg()
    if whole.device.type != "meta":
        if whole.device.type != device_mesh.device_type:
            whole = whole.to(device_mesh.world.device)
        if src_data_rank is not None:
            whole = _from_first(whole, device_mesh, src_data_rank)
    spec = Spec.of(layout, tuple(tensor.shape), tensor.dtype)
    local = redistribute_local(whole, spec.with_layout(layout.replicated()), layout)
    if local is whole:
        local = whole.clone(memory_format=torch.contiguous_format)
    return DTensor(local, spec, requires_grad=tensor.requires_grad)


def _from_first(whole: torch.Tensor, mesh: DeviceMesh, position: int) -> torch.Tensor:
    # After axis 0, all ranks at position `position` of the other axes have the right values; each further axis spreads
    # these.
    copy = whole.clone(memory_format=torch.contiguous_format)
    for axis in range(mesh.ndim):
        copy = broadcast(copy, position, mesh.get_group(axis))
    return copy
