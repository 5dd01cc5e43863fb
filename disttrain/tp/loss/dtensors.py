"""The loss of DTensor logits that one axis of their mesh cuts along the classes; other axes may cut the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard
from disttrain.dtensor._torch import as_one_call
from disttrain.dtensor.redistribute.transfers import all_reduce
from disttrain.errors import LayoutError
from disttrain.tp.loss.checks import NAME, LossOptions
from disttrain.tp.loss.local import loss_and_weight


@as_one_call
def loss_of_dtensor(
    logits: DTensor, target: torch.Tensor, weight: torch.Tensor | None, options: LossOptions
) -> DTensor:
    """As `vocab_parallel_cross_entropy` of a DTensor."""
    mesh, classes_dim = logits.device_mesh, classes_dim_of(logits)
    axis = classes_axis_of(logits)
    batch_axes = [other for other in range(mesh.ndim) if isinstance(logits.placements[other], Shard) and other != axis]
    local_target = _target_part(target, logits, axis)
    local_logits = logits.to_local().movedim(classes_dim, -1)
    vocab_size, group = logits.shape[classes_dim], mesh.get_group(axis)
    try:
        loss, total_weight = loss_and_weight(local_logits, local_target, _whole(weight), vocab_size, options, group)
    except Exception as error:
        if batch_axes and options.reduction == "mean":
            # Ranks with other parts of the batch have nothing to refuse, and would wait for this one's weight.
            mesh.group_along(batch_axes).refuse(NAME, error, "all_reduce")
        raise
    if options.reduction == "none":
        shape = [size for dim, size in enumerate(logits.shape) if dim != classes_dim]
        return DTensor.from_local(loss, mesh, _without_classes(logits, axis), shape=shape)
    loss = loss.sum()
    if options.reduction == "mean":
        if batch_axes:
            total_weight = all_reduce(total_weight, "sum", mesh.group_along(batch_axes))
        loss = loss / total_weight
    return DTensor.from_local(
        loss, mesh, [Partial() if other in batch_axes else Replicate() for other in range(mesh.ndim)]
    )


def classes_dim_of(logits: DTensor) -> int:
    """The dim of classes, as F.cross_entropy has it."""
    return min(1, logits.dim() - 1)


def is_cut_along_classes(logits: DTensor) -> bool:
    """True where an axis, or several, cut the classes."""
    return any(placement.cut_dim == classes_dim_of(logits) for placement in logits.placements)


def classes_axis_of(logits: DTensor) -> int:
    """The one axis that cuts the classes."""
    classes_dim = classes_dim_of(logits)
    axes = [axis for axis, placement in enumerate(logits.placements) if placement == Shard(classes_dim)]
    if len(axes) == 1 and all(isinstance(placement, Shard | Replicate) for placement in logits.placements):
        return axes[0]
    raise LayoutError(
        NAME,
        f"logits of shape {tuple(logits.shape)} lie as {list(logits.placements)}; one axis must cut dim {classes_dim}, "
        "the classes, and others may only cut other dims.",
        "Redistribute them, or use F.cross_entropy, which takes any layout.",
        rank=logits.device_mesh.get_rank(),
    )


def _without_classes(logits: DTensor, axis: int) -> list[Placement]:
    """The placements of `logits` for a tensor that has their dims but for the classes."""
    classes_dim = classes_dim_of(logits)
    placements: list[Placement] = []
    for other, placement in enumerate(logits.placements):
        dim = placement.cut_dim
        if other == axis or dim is None:
            placements.append(Replicate())
        else:
            placements.append(Shard(dim - (dim > classes_dim)))
    return placements


def _target_part(target: torch.Tensor, logits: DTensor, axis: int) -> torch.Tensor:
    """The targets of this rank's part of the logits; probabilities with the classes along the last dim."""
    is_of_classes = not target.is_floating_point()
    if isinstance(target, DTensor):
        wanted: Sequence[Placement] = _without_classes(logits, axis) if is_of_classes else logits.placements
        target = cast(DTensor, target.detach()).redistribute(logits.device_mesh, wanted).to_local()
    return target if is_of_classes or target.dim() != logits.dim() else target.movedim(classes_dim_of(logits), -1)


def _whole(weight: torch.Tensor | None) -> torch.Tensor | None:
    return cast(DTensor, weight.detach()).full_tensor() if isinstance(weight, DTensor) else weight
