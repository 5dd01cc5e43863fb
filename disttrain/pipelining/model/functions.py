"""torch's linear, embedding and norm functions once more, with weights' gradients that may be computed later.

Every gradient is made by the calls that autograd makes for torch's own functions, so all bits are the same
(derivatives.yaml and FunctionsManual.cpp of torch say which).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from disttrain.autocast import is_within_autocast
from disttrain.weight_grads import Grads, current_keeper, now_or_later, sum_of

_aten = torch.ops.aten
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def are_plain(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """False where one is another kind of tensor, such as a DTensor."""
    return type(x) in _PLAIN and type(weight) in _PLAIN


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear: x (..., in), weight (out, in) -> (..., out)."""
    if x.dim() < 2 or not are_plain(x, weight):
        return F.linear(x, weight, bias)
    return _product(x, weight, bias, is_in_out=False)


def addmm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x (..., in) as one matrix times weight (in, out), plus bias -> (..., out)."""
    return _product(x, weight, bias, is_in_out=True)


def embedding(
    places: torch.Tensor, weight: torch.Tensor, padding_idx: int | None, scale_grad_by_freq: bool
) -> torch.Tensor:
    """F.embedding without max_norm and sparse."""
    padding = -1 if padding_idx is None else padding_idx
    return _Embedding.apply(places, weight, padding, scale_grad_by_freq)  # type: ignore[no-any-return, no-untyped-call]


def layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """F.layer_norm with a weight."""
    return _LayerNorm.apply(x, list(shape), weight, bias, eps)  # type: ignore[no-any-return, no-untyped-call]


def rms_norm(x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor, eps: float | None) -> torch.Tensor:
    """F.rms_norm with a weight, where torch computes it by one kernel."""
    return _RMSNorm.apply(x, list(shape), weight, eps)  # type: ignore[no-any-return, no-untyped-call]


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, is_in_out: bool) -> torch.Tensor:
    if not is_within_autocast(x.device):
        return _Product.apply(x, weight, bias, is_in_out, None)  # type: ignore[no-any-return, no-untyped-call]
    kind = x.device.type
    with torch.autocast(kind, enabled=False):
        return _Product.apply(x, weight, bias, is_in_out, torch.get_autocast_dtype(kind))  # type: ignore[no-any-return, no-untyped-call]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, is_in_out: bool, dtype: torch.dtype | None
    ) -> torch.Tensor:
        ctx.keeper, ctx.parameters = current_keeper(), (weight, bias)
        if dtype is not None:
            x, bias = _lowered(x, dtype), _lowered(bias, dtype)
            if ctx.keeper is not None and weight.is_leaf and _is_lowered(weight, dtype):
                weight = ctx.keeper.cast(weight, dtype)
            else:
                weight = _lowered(weight, dtype)
        ctx.is_in_out = is_in_out
        ctx.save_for_backward(x, weight)
        if not is_in_out:
            return F.linear(x, weight, bias)
        rows = torch.addmm(bias, x.view(-1, x.shape[-1]), weight)
        return rows.view(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_rows = grad if grad.dim() == 2 else grad.reshape(-1, grad.shape[-1])
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        matrix = weight if ctx.is_in_out else weight.t()
        x_grad = _left_grad(grad_rows, rows, matrix).view(x.shape) if needs_x else None
        matrix_shape, matrix_stride = matrix.shape, matrix.stride()
        is_in_out, keeper, parameter = ctx.is_in_out, ctx.keeper, ctx.parameters[0]
        # If the rows are not a view, torch adds the bias separately, to all dims.
        bias_grads = grad_rows if is_in_out or x.is_contiguous() else grad

        def weight_grads() -> Grads:
            matrix_grad = None
            total = sum_of(keeper, parameter, grad_rows.dtype) if needs_weight else None
            if total is not None:
                with torch.no_grad():
                    (total if is_in_out else total.t()).addmm_(rows.t(), grad_rows)
            elif needs_weight:
                matrix_grad = _right_grad(grad_rows, rows, matrix_shape, matrix_stride)
                matrix_grad = matrix_grad if is_in_out else matrix_grad.t()
            return matrix_grad, bias_grads.sum_to_size(grad_rows.shape[-1:]) if needs_bias else None

        return x_grad, *_now_or_later(ctx, (needs_weight, needs_bias), weight_grads), None, None


def _lowered(tensor: Any, dtype: torch.dtype) -> Any:
    """As autocast does it."""
    return tensor.to(dtype) if _is_lowered(tensor, dtype) else tensor


def _is_lowered(tensor: Any, dtype: torch.dtype) -> bool:
    return tensor is not None and tensor.is_floating_point() and tensor.dtype not in (torch.float64, dtype)


def _left_grad(grad: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Of `left` in left.mm(right): laid out as `left` is."""
    if _is_column_major(left.shape, left.stride()):
        return right.mm(grad.t()).t()
    return grad.mm(right.t())


def _right_grad(
    grad: torch.Tensor, left: torch.Tensor, right_shape: Sequence[int], right_stride: Sequence[int]
) -> torch.Tensor:
    """The same of `right`."""
    if _is_column_major(right_shape, right_stride):
        return grad.t().mm(left).t()
    return left.t().mm(grad)


def _is_column_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    return stride[0] == 1 and stride[1] == shape[0]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, places: torch.Tensor, weight: torch.Tensor, padding: int, scale_grad_by_freq: bool
    ) -> torch.Tensor:
        ctx.keeper, ctx.parameters = current_keeper(), (weight,)
        ctx.options = (weight.shape[0], padding, scale_grad_by_freq)
        ctx.save_for_backward(places)
        return torch.embedding(weight, places, padding, scale_grad_by_freq)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (places,) = ctx.saved_tensors
        options = ctx.options

        def weight_grads() -> Grads:
            return (_aten.embedding_dense_backward(grad, places, *options),)

        return None, *_now_or_later(ctx, (True,), weight_grads), None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, shape: list[int], weight: torch.Tensor, bias: Any, eps: float
    ) -> torch.Tensor:
        ctx.keeper, ctx.parameters = current_keeper(), (weight, bias)
        result, mean, inverse_std = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.shape = shape
        ctx.save_for_backward(x, weight, bias, mean, inverse_std)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, bias, mean, inverse_std = ctx.saved_tensors
        needs_x, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        shape = ctx.shape
        saved = (x, shape, mean, inverse_std)
        x_grad = None
        if needs_x:
            x_grad = _aten.native_layer_norm_backward(grad, *saved, weight, bias, [True, False, False])[0]

        # Only their shapes matter; their memory may have been freed by then.
        like_weight = weight.new_empty(weight.shape)
        like_bias = None if bias is None else like_weight

        def weight_grads() -> Grads:
            mask = [False, needs_weight, needs_bias]
            grads = _aten.native_layer_norm_backward(grad, *saved, like_weight, like_bias, mask)
            return grads[1] if needs_weight else None, grads[2] if needs_bias else None

        return x_grad, None, *_now_or_later(ctx, (needs_weight, needs_bias), weight_grads), None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: list[int], weight: torch.Tensor, eps: float | None) -> torch.Tensor:
        ctx.keeper, ctx.parameters = current_keeper(), (weight,)
        result, inverse_rms = _aten._fused_rms_norm(x, shape, weight, eps)
        ctx.shape = shape
        ctx.save_for_backward(x, weight, inverse_rms)
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, inverse_rms = ctx.saved_tensors
        needs_x, _, needs_weight, _ = ctx.needs_input_grad
        shape = ctx.shape
        x_grad = None
        if needs_x:
            x_grad = _aten._fused_rms_norm_backward(grad, x, shape, inverse_rms, weight, [True, False])[0]
        like_weight = weight.new_empty(weight.shape)

        def weight_grads() -> Grads:
            return (_aten._fused_rms_norm_backward(grad, x, shape, inverse_rms, like_weight, [False, True])[1],)

        return x_grad, None, *_now_or_later(ctx, (needs_weight,), weight_grads), None


def _now_or_later(ctx: Any, needed: Sequence[bool], compute: Any) -> Grads:
    parameters = [parameter if is_needed else None for parameter, is_needed in zip(ctx.parameters, needed, strict=True)]
    return now_or_later(ctx.keeper, parameters, compute)
