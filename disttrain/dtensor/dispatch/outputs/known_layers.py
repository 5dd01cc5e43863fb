"""Results of operators that layers of images, activations and losses use, by formulas, as in `known_results.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from disttrain.dtensor._torch import OpOverload
from disttrain.dtensor.dispatch.outputs.known_shapes import WIDE, Shape, along, reduced

Result = tuple[Shape, torch.dtype]
Results = Sequence[Result | None] | None
"""None among them: a gradient that is not asked for."""


def _loss(operand: torch.Tensor, target: torch.Tensor, reduction: int = 1, *factors: float) -> Results:
    if operand.shape != target.shape or operand.dtype is not target.dtype or not operand.dtype.is_floating_point:
        return None
    return [(() if reduction else tuple(operand.shape), operand.dtype)]


def _loss_backward(
    grad: torch.Tensor, operand: torch.Tensor, target: torch.Tensor, reduction: int = 1, *factors: float
) -> Results:
    losses = _loss(operand, target, reduction)
    is_whole = grad.dtype is operand.dtype and tuple(grad.shape) in ((), tuple(operand.shape))
    return [(tuple(operand.shape), operand.dtype)] if losses and is_whole else None


def _weighted_loss(operand: torch.Tensor, target: torch.Tensor, weight: Any = None, reduction: int = 1) -> Results:
    return None if weight is not None else _loss(operand, target, reduction)


def _weighted_loss_backward(
    grad: torch.Tensor, operand: torch.Tensor, target: torch.Tensor, weight: Any = None, reduction: int = 1
) -> Results:
    return None if weight is not None else _loss_backward(grad, operand, target, reduction)


def _binary_loss(
    scores: torch.Tensor, target: torch.Tensor, weight: Any = None, factors: Any = None, reduction: int = 1
) -> Results:
    return None if weight is not None or factors is not None else _loss(scores, target, reduction)


def _gated(operand: torch.Tensor, dim: int = -1) -> Results:
    if along(operand, dim, False) is None or operand.shape[dim] % 2 or not operand.dtype.is_floating_point:
        return None
    shape = [*operand.shape]
    shape[dim] //= 2
    return [(tuple(shape), operand.dtype)]


def _gated_backward(grad: torch.Tensor, operand: torch.Tensor, dim: int) -> Results:
    gated = _gated(operand, dim)
    if gated is None or gated[0] != (tuple(grad.shape), grad.dtype):
        return None
    return [(tuple(operand.shape), operand.dtype)]


def _extremes(operand: torch.Tensor, *, dim: int | None = None, keepdim: bool = False) -> Results:
    shapes = reduced(operand, None if dim is None else [dim], keepdim)
    if shapes is None or shapes[0] is None or operand.dtype.is_complex or not operand.numel():
        return None
    return [(shapes[0], operand.dtype)] * 2


def _windows(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _spread(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """The inverse of `_windows`, as far as it has one."""
    return (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1


def _convolved(
    operand: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Results:
    num_dims = operand.ndim - 2
    dtypes = {value.dtype for value in (operand, weight, bias) if value is not None}
    if num_dims not in (1, 2, 3) or weight.ndim != operand.ndim or len(dtypes) > 1:
        return None
    if not operand.dtype.is_floating_point or not operand.numel():
        return None
    if weight.shape[0] % groups or not weight.numel():
        return None
    first, second = weight.shape[0], weight.shape[1] * groups
    channels, results = (first, second) if transposed else (second, first)
    if operand.shape[1] != channels or (bias is not None and tuple(bias.shape) != (results,)):
        return None
    ways = [_each(value, num_dims) for value in (stride, padding, dilation)]
    windows = [*zip(operand.shape[2:], weight.shape[2:], *ways, strict=True)]
    if transposed:
        more = _each(output_padding, num_dims)
        sizes = [_spread(*window) + size for window, size in zip(windows, more, strict=True)]
    else:
        sizes = [_windows(*window) for window in windows]
    return [((operand.shape[0], results, *sizes), operand.dtype)] if min(sizes) > 0 else None


def _each(values: Sequence[int] | int, num_dims: int) -> list[int]:
    listed = [values] if isinstance(values, int) else [*values]
    return listed * num_dims if len(listed) == 1 else listed


def _convolved_backward(
    grad: torch.Tensor,
    operand: torch.Tensor,
    weight: torch.Tensor,
    _bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> Results:
    results = _convolved(operand, weight, None, stride, padding, dilation, transposed, output_padding, groups)
    if not results or not results[0] or results[0] != (tuple(grad.shape), grad.dtype) or not any(wanted):
        return None
    shapes = (tuple(operand.shape), tuple(weight.shape), results[0][0][1:2])
    return [(shape, grad.dtype) if is_wanted else None for shape, is_wanted in zip(shapes, wanted, strict=True)]


def _pooled(
    operand: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    dilation: Sequence[int] | int = 1,
    by_ceiling: bool = False,
) -> Results:
    """The largest of each window, and their places."""
    pooled = _mean_pooled(operand, kernel, stride, padding, by_ceiling, dilation=dilation)
    return pooled and [*pooled, (pooled[0][0], torch.int64)] if pooled and pooled[0] else None


def _mean_pooled(
    operand: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    by_ceiling: bool = False,
    _counts_padding: bool = True,
    divisor: int | None = None,
    *,
    dilation: Sequence[int] | int = 1,
) -> Results:
    num_dims = operand.ndim - 2
    if num_dims not in (2, 3) or not operand.numel() or by_ceiling or divisor is not None:
        return None
    kernels = _each(kernel, num_dims)
    ways = kernels, *(_each(value, num_dims) for value in (stride or kernels, padding, dilation))
    if (
        min(kernels) < 1
        or not operand.dtype.is_floating_point
        or any(2 * pad > size for pad, size in zip(ways[2], kernels, strict=True))
    ):
        return None
    sizes = [_windows(size, *way) for size, *way in zip(operand.shape[2:], *ways, strict=True)]
    return [((*operand.shape[:2], *sizes), operand.dtype)] if min(sizes) > 0 else None


def _pooled_backward(grad: torch.Tensor, operand: torch.Tensor, *more: Any) -> Results:
    *settings, indices = more
    pooled = _pooled(operand, *settings)
    is_alike = pooled is not None and pooled[0] == (tuple(grad.shape), grad.dtype) and indices.shape == grad.shape
    return [(tuple(operand.shape), operand.dtype)] if is_alike else None


def _mean_pooled_backward(grad: torch.Tensor, operand: torch.Tensor, *settings: Any) -> Results:
    pooled = _mean_pooled(operand, *settings)
    return [(tuple(operand.shape), operand.dtype)] if pooled and pooled[0] == (tuple(grad.shape), grad.dtype) else None


def _group_norm(
    operand: torch.Tensor, weight: Any, bias: Any, batch: int, channels: int, size: int, num_groups: int, eps: float
) -> Results:
    if operand.ndim < 2 or tuple(operand.shape[:2]) != (batch, channels) or operand.dtype not in WIDE:
        return None
    if operand.numel() != batch * channels * size:
        return None
    if channels % num_groups or any(not _is_of(each, channels, operand) for each in (weight, bias)):
        return None
    return [(tuple(operand.shape), operand.dtype), *[((batch, num_groups), operand.dtype)] * 2]


def _group_norm_backward(
    grad: torch.Tensor, operand: torch.Tensor, mean: Any, rstd: Any, weight: Any, *counts_and_wanted: Any
) -> Results:
    batch, channels, size, num_groups, wanted = counts_and_wanted
    forward = _group_norm(operand, weight, None, batch, channels, size, num_groups, 0.0)
    if forward is None or forward[0] != (tuple(grad.shape), grad.dtype) or not any(wanted):
        return None
    if any(forward[1] != (tuple(value.shape), value.dtype) for value in (mean, rstd)):
        return None
    shapes = (tuple(operand.shape), (channels,), (channels,))
    return [(shape, grad.dtype) if is_wanted else None for shape, is_wanted in zip(shapes, wanted, strict=True)]


def _batch_norm(operand: torch.Tensor, *more: Any) -> Results:
    *vectors, trains, _, _ = more
    if operand.ndim < 2 or operand.dtype not in WIDE or not trains or operand.numel() == operand.shape[1]:
        return None
    channels = operand.shape[1]
    if not all(_is_of(each, channels, operand) for each in vectors):
        return None
    return [(tuple(operand.shape), operand.dtype), *[((channels,), operand.dtype)] * 2]


def _is_of(vector: torch.Tensor | None, channels: int, operand: torch.Tensor) -> bool:
    return vector is None or (tuple(vector.shape) == (channels,) and vector.dtype is operand.dtype)


def _alike(
    operand: torch.Tensor,
    *_: Any,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Results:
    if layout not in (None, torch.strided) or memory_format not in (None, torch.preserve_format):
        return None
    return [(tuple(operand.shape), dtype or operand.dtype)]


def _new(operand: torch.Tensor, size: Sequence[int], *value: Any, **more: Any) -> Results:
    alike = _alike(operand, **more)
    is_known = all(type(length) is int and length >= 0 for length in size)
    return [(tuple(size), alike[0][1])] if alike and alike[0] and is_known else None


def _log_sigmoid(operand: torch.Tensor) -> Results:
    return [(tuple(operand.shape), operand.dtype)] * 2 if operand.dtype.is_floating_point else None


def _dropped(operand: torch.Tensor, _probability: float, _train: bool | None) -> Results:
    shape = tuple(operand.shape)
    return [(shape, operand.dtype), (shape, torch.bool)] if operand.dtype.is_floating_point else None


_ATEN: Final = torch.ops.aten
FROM_ANY_GRADIENT: Final = frozenset(
    {
        _ATEN.convolution_backward.default,
        *(getattr(_ATEN, f"max_pool{dims}d_with_indices_backward").default for dims in (2, 3)),
        *(getattr(_ATEN, f"avg_pool{dims}d_backward").default for dims in (2, 3)),
    }
)
"""Operators whose results are contiguous also where the gradient, which comes first, is expanded."""
LAYERS: Final[dict[OpOverload, Callable[..., Results]]] = {
    _ATEN.mse_loss.default: _loss,
    _ATEN.mse_loss_backward.default: _loss_backward,
    _ATEN.smooth_l1_loss.default: _loss,
    _ATEN.smooth_l1_loss_backward.default: _loss_backward,
    _ATEN.huber_loss.default: _loss,
    _ATEN.huber_loss_backward.default: _loss_backward,
    _ATEN.binary_cross_entropy.default: _weighted_loss,
    _ATEN.binary_cross_entropy_backward.default: _weighted_loss_backward,
    _ATEN.binary_cross_entropy_with_logits.default: _binary_loss,
    _ATEN.glu.default: _gated,
    _ATEN.glu_backward.default: _gated_backward,
    _ATEN.aminmax.default: _extremes,
    _ATEN.convolution.default: _convolved,
    _ATEN.convolution_backward.default: _convolved_backward,
    **{getattr(_ATEN, f"max_pool{dims}d_with_indices").default: _pooled for dims in (2, 3)},
    **{getattr(_ATEN, f"max_pool{dims}d_with_indices_backward").default: _pooled_backward for dims in (2, 3)},
    **{getattr(_ATEN, f"avg_pool{dims}d").default: _mean_pooled for dims in (2, 3)},
    **{getattr(_ATEN, f"avg_pool{dims}d_backward").default: _mean_pooled_backward for dims in (2, 3)},
    _ATEN.native_group_norm.default: _group_norm,
    _ATEN.native_group_norm_backward.default: _group_norm_backward,
    _ATEN.native_batch_norm.default: _batch_norm,
    _ATEN.log_sigmoid_forward.default: _log_sigmoid,
    _ATEN.native_dropout.default: _dropped,
    **{getattr(_ATEN, f"{name}_like").default: _alike for name in ("empty", "full", "ones", "zeros")},
    **{getattr(_ATEN, f"new_{name}").default: _new for name in ("empty", "full", "ones", "zeros")},
}
