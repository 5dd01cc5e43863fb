"""Gradients that are zero, or are computed from zeros, which torch makes as plain tensors.

The second derivative of an average, for example, does not depend on the averaged values, and torch makes its gradient
plain zeros of the global shape. These operators are caught before autograd sees them, and return DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch

from disttrain.dtensor._torch import OpOverload, above_autograd, composed, is_traced, is_transformed
from disttrain.dtensor.dispatch.call_plan import tensors_of
from disttrain.dtensor.dispatch.mixed import is_plain
from disttrain.dtensor.spec.placement import Replicate
from disttrain.dtensor.spec.shard_sizes import contiguous_strides

_aten = torch.ops.aten


class _FlatIn(torch.autograd.Function):
    """The result, of which the gradient for `others` is zero."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        # Kept for their shapes only: their values may be overwritten.
        ctx.others = [other.detach() for other in others]
        return result.clone()  # a view could not be written to

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, ...]:
        zeros = [torch.zeros_like(other) for other in ctx.others]
        return grads[0], *[
            zero if has_one else None for zero, has_one in zip(zeros, ctx.needs_input_grad[1:], strict=True)
        ]


def _may_differentiate() -> bool:
    """False if no gradients are recorded, and within function transforms and traced graphs."""
    return torch.is_grad_enabled() and not is_transformed() and not is_traced()


def _flat_in(index: int) -> Callable[..., Any]:
    """For operators whose derivative by the argument at `index` is zero wherever there is one."""

    def run(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        other = args[index]
        if is_plain(other) or other.is_complex() or not (other.requires_grad and _may_differentiate()):
            return _as_ever(op, other, args, kwargs)
        # By its index: the same tensor may stand at another one as well.
        result, *_ = above_autograd(op, *args[:index], other.detach(), *args[index + 1 :], **kwargs)
        return _FlatIn.apply(result, other)  # type: ignore[no-untyped-call]

    return run


def _written(op: OpOverload, written: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """For operators in place whose derivative is zero, by what is written to or by another argument, or by both.

    They are composed of the operator that is not in place, and a copy, which autograd knows.
    """
    tensors = tensors_of([written, *args])
    if (
        any(map(is_plain, tensors))
        or written.is_complex()
        or not (_may_differentiate() and any(tensor.requires_grad for tensor in tensors))
    ):
        return above_autograd(op, written, *args, **kwargs)[0]
    is_flat, function = _IN_PLACE[op]
    # For its own gradient, the tensor that is written to is a copy.
    parts = [tensor.detach() if flat else tensor.clone() for tensor, flat in zip(tensors, is_flat, strict=False)]
    flats = [tensor for tensor, flat in zip(tensors, is_flat, strict=False) if flat and tensor.is_floating_point()]
    result = function(*[*parts, *args[len(tensors) - 1 :]], **kwargs).to(written.dtype)
    return written.copy_(_FlatIn.apply(result, *flats))  # type: ignore[no-untyped-call]


def _as_ever(op: OpOverload, tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `op` on `tensor` and others; in most backwards autograd has nothing to do there, and is passed."""
    others = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    kinds = {type(tensor), torch.Tensor, torch.nn.Parameter}
    is_direct = not (is_plain(tensor) or torch.is_grad_enabled() or is_traced() or is_transformed())
    if is_direct and all(type(other) in kinds for other in others):
        return tensor.__torch_dispatch__(op, (type(tensor),), args, kwargs)
    results = above_autograd(op, *args, **kwargs)
    return results[0] if len(op._schema.returns) == 1 else results


class _PreluBackward(torch.autograd.Function):
    """The gradients of prelu, and theirs as torch has them: for those, zero is above."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, tensor: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(grad, tensor, weight)
        ctx.set_materialize_grads(False)
        is_above = tensor > 0
        return torch.where(is_above, grad, weight * grad), torch.where(is_above, 0.0, tensor * grad)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad, tensor, weight = ctx.saved_tensors
        is_above, (of_tensor, of_weight) = tensor >= 0, grads
        zero = torch.zeros_like(tensor)
        below = zero if of_tensor is None else weight * of_tensor
        return (
            torch.where(is_above, zero if of_tensor is None else of_tensor, below + _product(of_weight, tensor, zero)),
            torch.where(is_above, zero, _product(of_weight, grad, zero)),
            torch.where(is_above, zero, _product(of_tensor, grad, zero)),
        )


def _product(factor: torch.Tensor | None, other: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return zero if factor is None else factor * other


def _prelu_backward(op: OpOverload, grad: torch.Tensor, tensor: torch.Tensor, weight: torch.Tensor) -> Any:
    if is_plain(tensor) or not ((tensor.requires_grad or weight.requires_grad) and _may_differentiate()):
        return _as_ever(op, tensor, (grad, tensor, weight), {})
    return _PreluBackward.apply(grad, tensor, weight)  # type: ignore[no-untyped-call]


def _trace(op: OpOverload, matrix: torch.Tensor) -> torch.Tensor:
    if is_plain(matrix) or matrix.ndim != 2:
        return above_autograd(op, matrix)[0]
    return matrix.diagonal().sum()


def _det(op: OpOverload, matrix: torch.Tensor) -> torch.Tensor:
    """For tensor subclasses torch uses another formula for the gradient, whose own gradient is wrong."""
    if is_plain(matrix) or matrix.ndim < 2 or not _may_differentiate():
        plain: torch.Tensor = composed(op, matrix)
        return plain
    tensor: Any = matrix
    placements = [
        placement if placement.is_shard() and placement.cut_dim < matrix.ndim - 2 else Replicate()
        for placement in tensor.placements
    ]
    part: torch.Tensor = op(tensor.redistribute(placements=placements).to_local())
    shape = tuple(matrix.shape[:-2])
    result: torch.Tensor = type(tensor).from_local(
        part, tensor.device_mesh, placements, shape=shape, stride=contiguous_strides(shape)
    )
    return result


def _on_the_mesh(like: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor | None:
    return torch.zeros_like(like) if grad is not None and is_plain(grad) else None


def repeated(tensor: torch.Tensor, repeats: Sequence[int]) -> torch.Tensor:
    """`tensor.repeat(repeats)`, whose gradient torch makes of plain zeros where a dim is repeated 0 times.

    It is caught at the call, not at dispatch: `torch.autograd.grad` returns the gradient of an intermediate result
    before a hook on it could make it a DTensor.
    """
    if 0 not in repeats or not (tensor.requires_grad and _may_differentiate()):
        return torch.Tensor.repeat(tensor, repeats)
    return _FlatIn.apply(torch.Tensor.repeat(tensor.detach(), repeats), tensor)  # type: ignore[no-untyped-call,no-any-return]


def _tile(op: OpOverload, tensor: torch.Tensor, dims: Sequence[int]) -> Any:
    if is_plain(tensor) or 0 not in dims:
        return composed(op, tensor, dims)
    return repeated(tensor[(None,) * (len(dims) - tensor.ndim)], (*[1] * (tensor.ndim - len(dims)), *dims))


def own_zeros(op: OpOverload, args: tuple[Any, ...]) -> bool:
    """Let gradients of zeros that torch will make of plain tensors become DTensors. False for calls without any.

    To be called where `op`, which is too frequent to be caught, is dispatched.
    """
    if op is not _aten.cat.default:
        return False
    operands = [tensor for tensor in args[0] if tensor.ndim == 1 and tensor.shape[0] == 0]
    for operand in operands:
        if (
            is_plain(operand)
            or not (operand.requires_grad and _may_differentiate())
            or "_has_own_zeros" in vars(operand)
        ):
            continue
        vars(operand)["_has_own_zeros"] = True
        torch.Tensor.register_hook(operand, partial(_on_the_mesh, operand.detach()))  # type: ignore[no-untyped-call]
    return bool(operands)


_IN_PLACE: Final[dict[OpOverload, tuple[tuple[bool, ...], Callable[..., torch.Tensor]]]] = {
    _aten.copysign_.Tensor: ((False, True), torch.copysign),
    _aten.nextafter_.default: ((False, True), torch.nextafter),
    _aten.sgn_.default: ((True,), torch.sgn),
    _aten.eq_.Scalar: ((True,), torch.eq),
    _aten.eq_.Tensor: ((True, True), torch.eq),
    _aten.ge_.Scalar: ((True,), torch.ge),
    _aten.ge_.Tensor: ((True, True), torch.ge),
    _aten.gt_.Scalar: ((True,), torch.gt),
    _aten.gt_.Tensor: ((True, True), torch.gt),
    _aten.le_.Scalar: ((True,), torch.le),
    _aten.le_.Tensor: ((True, True), torch.le),
    _aten.lt_.Scalar: ((True,), torch.lt),
    _aten.lt_.Tensor: ((True, True), torch.lt),
    _aten.ne_.Scalar: ((True,), torch.ne),
    _aten.ne_.Tensor: ((True, True), torch.ne),
}
"""By which of their tensors the derivative is zero, and the same not in place."""

ZERO_GRADS: Final[dict[OpOverload, Callable[..., Any]]] = {
    _aten._prelu_kernel_backward.default: _prelu_backward,
    _aten.copysign.Tensor: _flat_in(1),
    _aten.linalg_det.default: _det,
    _aten.nextafter.default: _flat_in(1),
    _aten.sgn.default: _flat_in(0),
    _aten.tile.default: _tile,
    _aten.trace.default: _trace,
    **dict.fromkeys(_IN_PLACE, _written),
    **dict.fromkeys(
        (
            _aten._adaptive_avg_pool2d_backward.default,
            _aten._adaptive_avg_pool3d_backward.default,
            _aten.adaptive_max_pool2d_backward.default,
            _aten.adaptive_max_pool3d_backward.default,
            _aten.avg_pool2d_backward.default,
            _aten.avg_pool3d_backward.default,
            _aten.fractional_max_pool2d_backward.default,
            _aten.fractional_max_pool3d_backward.default,
            _aten.max_pool2d_with_indices_backward.default,
            _aten.max_pool3d_with_indices_backward.default,
            _aten.reflection_pad1d_backward.default,
            _aten.reflection_pad2d_backward.default,
            _aten.reflection_pad3d_backward.default,
            _aten.replication_pad1d_backward.default,
            _aten.replication_pad2d_backward.default,
            _aten.replication_pad3d_backward.default,
        ),
        _flat_in(1),
    ),
}
