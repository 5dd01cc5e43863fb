"""Softmax and its kin over a dim that may be cut: the ranks share a maximum and a sum, no elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, Signature, all_replicated
from disttrain.dtensor.rules.parts import cutting_axes, kept, largest, operand_part, partials_of, summed
from disttrain.dtensor.rules.reduction import keeps_dims, reduced_dims
from disttrain.dtensor.spec.placement import Placement, Replicate, Shard


def same_shape(call: OpCall) -> Sequence[Signature]:
    """Any dim may be cut, in all operands alike; a gradient, the first of two operands, may be partial."""
    num_operands = len(call.operands)
    signatures = [all_replicated(call)]
    signatures += [Signature.of((Shard(dim),) * num_operands, Shard(dim)) for dim in range(len(call.output_shape))]
    if num_operands == 2:
        signatures += [
            Signature.of((kind, Replicate()), kind) for kind in partials_of(call, 0) if kind.reduce_op in ("sum", "avg")
        ]
    return signatures


def softmax(call: OpCall, propagation: Propagation) -> Compute:
    part = operand_part(call, propagation, 0)
    dim = _dim(call)
    axes = cutting_axes(part.layout, {dim})
    if not axes:
        return call.op
    is_log, is_safe = call.facts.name == "aten._log_softmax", call.facts.name == "aten._safe_softmax"
    dtype = call.outputs[0].dtype

    def compute(local: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        wide = local.to(torch.promote_types(dtype, torch.float32))
        top = largest(_top(wide, (dim,)), part.mesh, axes)
        shifted = wide - top
        powers = shifted.exp()
        total = summed(powers.sum(dim, keepdim=True), part.mesh, axes)
        result = shifted - total.log() if is_log else powers / total
        if is_safe:
            result = result.masked_fill_(top == float("-inf"), 0.0)
        return result.to(dtype)

    return compute


def softmax_backward(call: OpCall, propagation: Propagation) -> Compute:
    """The gradient's component along the output, which is a sum over the dim, is taken away."""
    part = operand_part(call, propagation, 1)
    dim = _dim(call)
    axes = cutting_axes(part.layout, {dim})
    if not axes:
        return call.op
    is_log = call.facts.name == "aten._log_softmax_backward_data"
    dtype = call.outputs[0].dtype

    def compute(grad: torch.Tensor, output: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        wide = torch.promote_types(grad.dtype, torch.float32)
        grad, output = grad.to(wide), output.to(wide)
        along = grad if is_log else grad * output
        total = summed(along.sum(dim, keepdim=True), part.mesh, axes)
        result = grad - output.exp() * total if is_log else output * (grad - total)
        return result.to(dtype)

    return compute


def logsumexp(call: OpCall) -> Sequence[Signature]:
    """Any dim may be cut; along a reduced one the ranks agree on the result."""
    removed = reduced_dims(call)
    signatures = [all_replicated(call)]
    for dim in range(len(call.operand.shape)):
        placement: Placement = Replicate()
        if dim not in removed:
            placement = Shard(dim if keeps_dims(call) else kept(dim, removed))
        elif call.operand.dtype.is_complex:
            continue
        signatures.append(Signature.of((Shard(dim),), placement))
    return signatures


def localize_logsumexp(call: OpCall, propagation: Propagation) -> Compute:
    part = operand_part(call, propagation, 0)
    removed = tuple(sorted(reduced_dims(call)))
    axes = cutting_axes(part.layout, removed)
    if not axes:
        return call.op
    keepdim = keeps_dims(call)
    dtype = call.outputs[0].dtype

    def compute(local: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        wide = local.to(torch.promote_types(dtype, torch.float32))
        top = largest(_top(wide, removed), part.mesh, axes)
        # From infinity nothing may be taken away.
        top = top.masked_fill_(top.isinf(), 0.0)
        total = summed((wide - top).exp().sum(removed, keepdim=True), part.mesh, axes)
        result = total.log_().add_(top).to(dtype)
        return result if keepdim else result.squeeze(removed)

    return compute


def _top(local: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The maximum over `dims`, which stay with size 1; of nothing, minus infinity."""
    if all(local.shape[dim] for dim in dims):
        return local.amax(dims, keepdim=True)
    shape = [1 if dim in dims else size for dim, size in enumerate(local.shape)]
    return local.new_full(shape, float("-inf"))


def _dim(call: OpCall) -> int:
    return int(call.argument("dim", 0)) % max(1, len(call.output_shape))


_FORWARD = Rule(same_shape, softmax, goes_by_layout=True)
_BACKWARD = Rule(same_shape, softmax_backward, goes_by_layout=True)

RULES: dict[str, Rule] = {
    "aten._log_softmax": _FORWARD,
    "aten._log_softmax_backward_data": _BACKWARD,
    "aten._safe_softmax": _FORWARD,
    "aten._softmax": _FORWARD,
    "aten._softmax_backward_data": _BACKWARD,
    "aten.logsumexp": Rule(logsumexp, localize_logsumexp, goes_by_layout=True),
}
