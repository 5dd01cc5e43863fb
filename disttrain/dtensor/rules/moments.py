"""Variance and standard deviation: each rank's mean and sum of squares about it, merged by Chan, Golub and LeVeque.

T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
1979. Counts are known from the layout, so one gather along each axis is all that moves.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch

from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, Signature, all_replicated, result_specs
from disttrain.dtensor.rules.parts import cutting_axes, gathered, kept, operand_part
from disttrain.dtensor.rules.reduction import keeps_dims, reduced_dims
from disttrain.dtensor.spec.layout import Spec
from disttrain.dtensor.spec.placement import Placement, Replicate, Shard
from disttrain.dtensor.spec.shard_sizes import local_shape


def moments(call: OpCall) -> Sequence[Signature]:
    """Any dim may be cut; along a reduced one the ranks agree on the result."""
    removed = reduced_dims(call)
    signatures = [all_replicated(call)]
    for dim in range(len(call.operand.shape)):
        if dim not in removed:
            placement: Placement = Shard(dim if keeps_dims(call) else kept(dim, removed))
        elif call.operand.dtype.is_complex:
            continue
        else:
            placement = Replicate()
        signatures.append(Signature.of((Shard(dim),), *[placement] * len(call.outputs)))
    return signatures


def localize(call: OpCall, propagation: Propagation) -> Compute:
    part = operand_part(call, propagation, 0)
    removed = tuple(sorted(reduced_dims(call)))
    axes = cutting_axes(part.layout, removed)
    if not axes:
        return call.op if all(part.local_shape) or not all(part.shape) else _nothing(call, propagation)
    counts = [(axis, _counts(part, removed, axis)) for axis in reversed(axes)]
    total = math.prod(part.shape[dim] for dim in removed)
    freedom = max(0.0, total - _correction(call))
    keepdim = keeps_dims(call)
    is_std = call.facts.name in ("aten.std", "aten.std_mean")

    def compute(local: torch.Tensor, *_: Any, **__: Any) -> Any:
        mean, squares = _own(local, removed)
        for axis, sizes in counts:
            mean, squares = _merged(gathered(torch.stack((mean, squares)), part.mesh, axis), sizes)
        spread = squares / freedom
        if is_std:
            spread = spread.sqrt_()
        if not keepdim:
            spread, mean = spread.squeeze(removed), mean.squeeze(removed)
        return (spread.to(local.dtype), mean.to(local.dtype)) if len(call.outputs) == 2 else spread.to(local.dtype)

    return compute


def _nothing(call: OpCall, propagation: Propagation) -> Compute:
    """For a part without rows, of which torch would warn that it has no degrees of freedom."""
    parts = result_specs(call, propagation)

    def compute(local: torch.Tensor, *_: Any, **__: Any) -> Any:
        made = tuple(local.new_empty(part.local_shape, dtype=part.dtype) for part in parts)
        return made if len(made) > 1 else made[0]

    return compute


def _correction(call: OpCall) -> float:
    if "unbiased" in call.facts.arguments:
        return 1.0 if call.argument("unbiased", True) else 0.0
    return float(call.argument("correction", 1))


def _own(local: torch.Tensor, removed: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and sum of squares about it, of this rank's part; reduced dims stay, with size 1."""
    wide = local.to(torch.promote_types(local.dtype, torch.float32))
    count = math.prod(local.shape[dim] for dim in removed)
    if local.numel() == 0:
        shape = [1 if dim in removed else size for dim, size in enumerate(local.shape)]
        return wide.new_zeros(shape), wide.new_zeros(shape)
    variance, mean = torch.var_mean(wide, removed, correction=0, keepdim=True)
    return mean, variance.mul_(count)


def _counts(part: Spec, removed: Collection[int], axis: int) -> tuple[int, ...]:
    """The number of elements that each rank along `axis` stands for, once the axes after it are merged."""
    coordinate = list(part.mesh.get_coordinate() or (0,) * part.mesh.ndim)
    placements = [
        Replicate() if later > axis and placement.cut_dim in removed else placement
        for later, placement in enumerate(part.placements)
    ]
    counts = []
    for position in range(part.mesh.shape[axis]):
        coordinate[axis] = position
        shape = local_shape(part.shape, part.mesh.shape, coordinate, placements)
        counts.append(math.prod(shape[dim] for dim in removed))
    return tuple(counts)


def _merged(stacked: torch.Tensor, counts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and sum of squares of all pieces; `stacked` is (piece, 2, ...)."""
    means, squares = stacked.unbind(1)
    sizes = means.new_tensor(counts).view(-1, *[1] * (means.ndim - 1))
    # A rank of which every peer is empty, too, counts for nothing on the next axis.
    mean = (means * sizes).sum(0) / max(1, sum(counts))
    return mean, squares.sum(0) + ((means - mean).square_() * sizes).sum(0)


_RULE = Rule(moments, localize, reads_numbers=True)

RULES = dict.fromkeys(("aten.std", "aten.std_mean", "aten.var", "aten.var_mean"), _RULE)
