"""The loss of a linear layer of DTensors: one axis of their mesh may cut the classes, others the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard
from disttrain.dtensor._torch import as_one_call
from disttrain.dtensor.redistribute.transfers import all_reduce
from disttrain.errors import LayoutError
from disttrain.kernels.cross_entropy.graph import NAME
from disttrain.kernels.cross_entropy.linear import LinearLossOptions, loss_and_weight, mean_of


@as_one_call
def loss_of_dtensors(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    options: LinearLossOptions,
) -> DTensor:
    """Computes `linear_cross_entropy` of DTensors. Collective."""
    if not isinstance(hidden, DTensor) or not isinstance(weight, DTensor):
        problem = f"hidden is a {type(hidden).__name__}, weight a {type(weight).__name__}."
        raise LayoutError(NAME, problem, "Give DTensors of one mesh, or to_local() of both with a group.")
    mesh = hidden.device_mesh
    axis = _classes_axis(weight)
    batch = _batch_placements(hidden, axis)
    batch_axes = [other for other, placement in enumerate(batch) if isinstance(placement, Shard)]
    # Each rank has the term of its classes to hidden's gradient, and of its part of the batch to the parameters'.
    hidden_grad = [Partial() if other == axis else placement for other, placement in enumerate(batch)]
    own_hidden = hidden.redistribute(placements=batch).to_local(grad_placements=hidden_grad)
    own_weight, own_bias = _part(weight, batch_axes), None if bias is None else _part(bias, batch_axes)
    if isinstance(target, DTensor):
        target = cast(DTensor, target.detach()).redistribute(mesh, batch).to_local()
    whole = cast(DTensor, class_weight.detach()).full_tensor() if isinstance(class_weight, DTensor) else class_weight
    group = None if axis is None else mesh.get_group(axis)
    vocab_size = None if axis is None else weight.shape[0]
    try:
        losses, total_weight = loss_and_weight(
            own_hidden, own_weight, target, own_bias, whole, vocab_size, options, group, sums_hidden=False
        )
    except Exception as error:
        if batch_axes and options.reduction == "mean":
            # Ranks with other parts of the batch have nothing to refuse, and would wait for this one's weight.
            mesh.group_along(batch_axes).refuse(NAME, error, "all_reduce")
        raise
    if options.reduction == "none":
        return DTensor.from_local(losses, mesh, batch, shape=list(hidden.shape[:-1]))
    if options.reduction == "mean":
        if batch_axes:
            total_weight = all_reduce(total_weight, "sum", mesh.group_along(batch_axes))
        losses = mean_of(losses, total_weight)
    return DTensor.from_local(
        losses, mesh, [Partial() if other in batch_axes else Replicate() for other in range(mesh.ndim)]
    )


def _classes_axis(weight: DTensor) -> int | None:
    axes = [axis for axis, placement in enumerate(weight.placements) if placement == Shard(0)]
    others = [placement for placement in weight.placements if placement != Shard(0)]
    if len(axes) <= 1 and all(isinstance(placement, Replicate) for placement in others):
        return axes[0] if axes else None
    raise LayoutError(
        NAME,
        f"weight of shape {tuple(weight.shape)} lies as {list(weight.placements)}; at most one axis may cut it, along "
        "dim 0, the classes.",
        "Redistribute it.",
        rank=weight.device_mesh.get_rank(),
    )


def _batch_placements(hidden: DTensor, axis: int | None) -> Sequence[Placement]:
    """Whole along the axis that cuts the classes, and whole vectors everywhere."""
    last = hidden.dim() - 1
    return [
        placement if isinstance(placement, Shard) and other != axis and placement.dim != last else Replicate()
        for other, placement in enumerate(hidden.placements)
    ]


def _part(parameter: torch.Tensor, batch_axes: Sequence[int]) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    grads = [Partial() if axis in batch_axes else placement for axis, placement in enumerate(parameter.placements)]
    return parameter.to_local(grad_placements=grads)
