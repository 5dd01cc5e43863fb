"""RMSNorm and LayerNorm over the last dim, with the sum of a residual path before it, as one operator each way.

A norm is bound by memory. Forward reads its input and writes its output, and backward reads the input and a gradient
and writes one; the sum of a residual path costs one more read and write instead of three.

Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467); Ba et al., "Layer
Normalization" (1607.06450).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from disttrain.dtensor import Partial, Placement, Replicate, Shard, register_sharding
from disttrain.errors import ShapeError
from disttrain.kernels.choice import choose, wide_dtype
from disttrain.kernels.norms import reference as norms_reference
from disttrain.kernels.operators import batch, call, define, differentiate, refuse_second_derivative, reshaped

LARGEST_ROW: Final = 32768
"""Elements that a program keeps in registers."""

Normed = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    residual: torch.Tensor | None = None,
) -> Normed:
    """x / sqrt(mean(x ** 2) + eps) * weight over the last dim, as F.rms_norm.

    Args:    x  (..., D);  weight  (D,), of x's dtype or fp32;  eps  None: the smallest step of fp32 (fp64), as torch;
             residual  as x: it is added first.
    Returns: as x, computed in fp32 (fp64 of fp64); with a residual also x + residual, rounded to x's dtype.
    Raises:  ShapeError for tensors that don't fit.
    Gradient: of all tensors, once.
    """
    return _normed("rms_norm", x, residual, weight, None, _eps(x) if eps is None else eps, False)


def _eps(x: torch.Tensor) -> float:
    return torch.finfo(wide_dtype(x.dtype)).eps if x.is_floating_point() else 0.0


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: torch.Tensor | None = None,
) -> Normed:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dim, as F.layer_norm; else as `rms_norm`."""
    return _normed("layer_norm", x, residual, weight, bias, eps, True)


def _normed(
    operation: str,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    is_centered: bool,
) -> Normed:
    if not x.is_floating_point() or not x.dim():
        raise ShapeError(operation, f"x is {x.dtype} of shape {tuple(x.shape)}.", "Give floats of one dim or more.")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        problem = f"residual is {residual.dtype} of shape {tuple(residual.shape)}, x {x.dtype} {tuple(x.shape)}."
        raise ShapeError(operation, problem, "Give both alike.")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != x.shape[-1:]:
            problem = f"{name} has shape {tuple(parameter.shape)}; x's last dim is {x.shape[-1]}."
            raise ShapeError(operation, problem, "Norms are over the last dim.")
    if bias is not None and weight is None:
        raise ShapeError(operation, "there is a bias without a weight.", "Give a weight of ones.")
    if residual is None:
        y, _ = call(NORM, x, weight, bias, eps, is_centered)
        return y  # type: ignore[no-any-return]
    y, total, _ = call(ADD_NORM, x, residual, weight, bias, eps, is_centered)
    return y, total


def _load() -> Any:
    # Triton is not on every machine, and slow to load.
    from disttrain.kernels.norms import triton_kernels as norms_triton

    return norms_triton


def _kernels(x: torch.Tensor) -> Any:
    obstacle = f"a row has {x.shape[-1]} elements, of which at most {LARGEST_ROW} fit." * (x.shape[-1] > LARGEST_ROW)
    return choose("norm", x, obstacle, norms_reference, _load, is_fused_when_traced=True)


def _num_statistics(is_centered: bool) -> int:
    return 2 if is_centered else 1


def _norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, is_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, statistics = _kernels(x).forward(_rows(x), None, weight, bias, eps, is_centered)
    return reshaped(y, x.shape), _per_row(statistics, x)


def _norm_shapes(x: torch.Tensor, weight: Any, bias: Any, eps: float, is_centered: bool) -> Any:
    statistics = x.new_empty((*x.shape[:-1], _num_statistics(is_centered)), dtype=wide_dtype(x.dtype))
    return x.new_empty(x.shape), statistics


def _add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    is_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, total, statistics = _kernels(x).forward(_rows(x), _rows(residual), weight, bias, eps, is_centered)
    return reshaped(y, x.shape), reshaped(total, x.shape), _per_row(statistics, x)


def _add_norm_shapes(x: torch.Tensor, residual: Any, weight: Any, bias: Any, eps: float, is_centered: bool) -> Any:
    y, statistics = _norm_shapes(x, weight, bias, eps, is_centered)
    return y, x.new_empty(x.shape), statistics


def _norm_backward(
    grad: torch.Tensor,
    grad_total: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    statistics: torch.Tensor,
    num_parameters: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of x, and those of weight and bias, (num_parameters, D), of `dtype`."""
    grad_x, grad_parameters = _kernels(x).backward(
        _rows(grad),
        None if grad_total is None else _rows(grad_total),
        _rows(x),
        weight,
        statistics.view(-1, statistics.shape[-1]),
        num_parameters,
        dtype,
    )
    return reshaped(grad_x, x.shape), grad_parameters


def _norm_backward_shapes(
    grad: Any,
    grad_total: Any,
    x: torch.Tensor,
    weight: Any,
    statistics: torch.Tensor,
    num_parameters: int,
    dtype: torch.dtype,
) -> Any:
    return x.new_empty(x.shape), statistics.new_empty((num_parameters, x.shape[-1]), dtype=dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1, x.shape[-1]) if x.numel() else x.reshape(0, x.shape[-1])


def _per_row(statistics: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return reshaped(statistics, (*x.shape[:-1], statistics.shape[1]))


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, _, _ = inputs
    ctx.save_for_backward(x, weight, output[-1])
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _keep_add_norm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, weight, bias, _, _ = inputs
    ctx.save_for_backward(output[1], weight, output[-1])
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _grads(ctx: Any, grad: torch.Tensor | None, grad_total: torch.Tensor | None) -> tuple[Any, Any, Any]:
    """The gradients of x, weight and bias."""
    x, weight, statistics = ctx.saved_tensors
    if grad is None:
        return grad_total, None, None
    dtypes = [] if weight is None else [weight.dtype] if ctx.bias_dtype is None else [weight.dtype, ctx.bias_dtype]
    dtype = dtypes[0] if len(set(dtypes)) == 1 else statistics.dtype
    grad_x, grad_parameters = torch.ops.disttrain.norm_backward(
        grad, grad_total, x, weight, statistics, len(dtypes), dtype
    )
    grads = [part.to(dtype) for part, dtype in zip(grad_parameters.unbind(), dtypes, strict=True)]
    return grad_x, grads[0] if grads else None, grads[1] if len(grads) > 1 else None


def _backward_of_norm(ctx: Any, grad: torch.Tensor | None, _: Any) -> Any:
    return *_grads(ctx, grad, None), None, None


def _backward_of_add_norm(ctx: Any, grad: torch.Tensor | None, grad_total: torch.Tensor | None, _: Any) -> Any:
    grad_x, grad_weight, grad_bias = _grads(ctx, grad, grad_total)
    return grad_x, grad_x, grad_weight, grad_bias, None, None


_PARAMETERS = "Tensor? weight, Tensor? bias, float eps, bool is_centered"
NORM: Final = define(f"norm(Tensor x, {_PARAMETERS}) -> (Tensor, Tensor)", _norm, _norm_shapes, is_traceable=True)
ADD_NORM: Final = define(
    f"add_norm(Tensor x, Tensor residual, {_PARAMETERS}) -> (Tensor, Tensor, Tensor)",
    _add_norm,
    _add_norm_shapes,
    is_traceable=True,
)
NORM_BACKWARD: Final = define(
    "norm_backward(Tensor grad, Tensor? grad_total, Tensor x, Tensor? weight, Tensor statistics, int num_parameters, "
    "ScalarType dtype) -> (Tensor, Tensor)",
    _norm_backward,
    _norm_backward_shapes,
    is_traceable=True,
)
differentiate(NORM, _keep_norm, _backward_of_norm)
differentiate(ADD_NORM, _keep_add_norm, _backward_of_add_norm)
refuse_second_derivative(NORM_BACKWARD)
batch(NORM, 1)
batch(ADD_NORM, 2)
batch(NORM_BACKWARD, 0)  # which sums over all rows


Choices = list[tuple[list[Placement | None], list[Placement | None]]]


def _placements(x: Any, like_x: Sequence[Any], num_results: int) -> Choices:
    """Any dim but the last may be cut; what is of `given` has its dims, the rest is whole."""
    choices: Choices = []
    for dim in range(x.ndim - 1):
        cut: Placement = Shard(dim)
        operands: list[Placement | None] = [
            None if is_like_x is None else cut if is_like_x else Replicate() for is_like_x in like_x
        ]
        choices.append(([cut] * num_results, operands))
    return choices


def _whether(tensor: Any, is_like_x: bool) -> bool | None:
    return None if tensor is None else is_like_x


@register_sharding(NORM)
def _shard_norm(x: Any, weight: Any, bias: Any, eps: float, is_centered: bool) -> Choices:
    return _placements(x, [True, _whether(weight, False), _whether(bias, False), None, None], 2)


@register_sharding(ADD_NORM)
def _shard_add_norm(x: Any, residual: Any, weight: Any, bias: Any, eps: float, is_centered: bool) -> Choices:
    return _placements(x, [True, True, _whether(weight, False), _whether(bias, False), None, None], 3)


@register_sharding(NORM_BACKWARD)
def _shard_norm_backward(
    grad: Any, grad_total: Any, x: Any, weight: Any, statistics: Any, num_parameters: int, dtype: torch.dtype
) -> Choices:
    like_x = [True, _whether(grad_total, True), True, _whether(weight, False), True, None, None]
    return [([results[0], Partial()], operands) for results, operands in _placements(x, like_x, 1)]
