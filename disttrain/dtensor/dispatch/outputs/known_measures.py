"""Results of operators that measure, count or search, by formulas, as in `known_results.py`: products, moments, ranks
within an order, distances, histograms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from disttrain.dtensor._torch import OpOverload
from disttrain.dtensor.dispatch.outputs.known_pointwise import Result
from disttrain.dtensor.dispatch.outputs.known_shapes import Shape, along, broadcast, reduced

Results = Sequence[Result] | None


def without(operand: torch.Tensor, dims: Sequence[int] | None, keep: bool) -> Shape | None:
    """The shape after a reduction over `dims`; None for numbers that have no order."""
    shapes = reduced(operand, dims, keep)
    return None if shapes is None or operand.dtype.is_complex else shapes[0]


def floating(operand: torch.Tensor, dims: Sequence[int] | None, keep: bool = False) -> Results:
    """A reduction that keeps a floating dtype."""
    shape = without(operand, dims, keep)
    return [(shape, operand.dtype)] if shape is not None and operand.dtype.is_floating_point else None


def accumulated(operand: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a sum or product."""
    return dtype or (operand.dtype if operand.dtype.is_floating_point else torch.int64)


def running(operand: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Results:
    """Of all before an element, along a dim."""
    if along(operand, dim, False) is None or operand.dtype.is_complex:
        return None
    return [(tuple(operand.shape), accumulated(operand, dtype))]


def _running_extreme(operand: torch.Tensor, dim: int) -> Results:
    values = running(operand, dim, dtype=operand.dtype)
    return values and [*values, (tuple(operand.shape), torch.int64)]


def _product(operand: torch.Tensor, *, dtype: torch.dtype | None = None) -> Results:
    return None if operand.dtype.is_complex else [((), accumulated(operand, dtype))]


def _product_along(
    operand: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Results:
    shape = without(operand, [dim], keepdim)
    return None if shape is None else [(shape, accumulated(operand, dtype))]


def _two_moments(
    operand: torch.Tensor, dims: Sequence[int] | None = None, *, correction: Any = None, keepdim: bool = False
) -> Results:
    moment = floating(operand, dims or None, keepdim)
    return moment and [*moment, *moment]


def _with_place(operand: torch.Tensor, dim: int = -1, keepdim: bool = False) -> Results:
    """A value along a dim, and where it is."""
    shape = without(operand, [dim], keepdim)
    return None if shape is None or operand.dtype is torch.bool else [(shape, operand.dtype), (shape, torch.int64)]


def _kth(operand: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Results:
    outputs = _with_place(operand, dim, keepdim)
    return outputs if outputs and type(k) is int and 0 < k <= operand.shape[dim] else None


def _num_nonzero(operand: torch.Tensor, dims: Sequence[int] | int | None = None) -> Results:
    shape = without(operand, [dims] if isinstance(dims, int) else dims or None, False)
    return None if shape is None else [(shape, torch.int64)]


def _norm(operand: torch.Tensor, _order: Any, dims: Sequence[int], keepdim: bool = False) -> Results:
    return floating(operand, dims or None, keepdim)


def _searched(
    ordered: torch.Tensor,
    values: torch.Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Results:
    if sorter is not None or ordered.dtype is not values.dtype or not ordered.ndim:
        return None
    if ordered.ndim > 1 and ordered.shape[:-1] != values.shape[:-1]:
        return None
    return [(tuple(values.shape), torch.int32 if out_int32 else torch.int64)]


def _bucketized(
    values: torch.Tensor, ordered: torch.Tensor, *, out_int32: bool = False, right: bool = False
) -> Results:
    return _searched(ordered, values, out_int32=out_int32) if ordered.ndim == 1 else None


def _histogram(operand: torch.Tensor, bins: int = 100, least: float = 0, most: float = 0) -> Results:
    is_known = type(bins) is int and bins > 0 and operand.dtype.is_floating_point
    return [((bins,), operand.dtype)] if is_known else None


def _distance(first: torch.Tensor, second: torch.Tensor, _order: float = 2) -> Results:
    if first.dtype is not second.dtype or not first.dtype.is_floating_point:
        return None
    shape = broadcast([tuple(first.shape), tuple(second.shape)])
    return None if shape is None else [((), first.dtype)]


def _distances(first: torch.Tensor, second: torch.Tensor, _order: float, _mode: int | None) -> Results:
    """Of all rows of one to all of the other."""
    if first.ndim < 2 or first.ndim != second.ndim or first.dtype is not second.dtype:
        return None
    if first.shape[:-2] != second.shape[:-2] or first.shape[-1] != second.shape[-1]:
        return None
    return [((*first.shape[:-1], second.shape[-2]), first.dtype)] if first.dtype.is_floating_point else None


def _distances_backward(
    grad: torch.Tensor, first: torch.Tensor, second: torch.Tensor, _order: float, distances: torch.Tensor
) -> Results:
    forward = _distances(first, second, 2.0, None)
    is_alike = forward and forward[0] == (tuple(grad.shape), grad.dtype) and distances.shape == grad.shape
    return [(tuple(first.shape), first.dtype)] if is_alike else None


def combined(first: torch.Tensor, second: Any, alpha: float = 1) -> Results:
    """A sum or difference, whatever the dtypes of both."""
    result = product(first, second)
    if result is None or result[0][1] is torch.bool:
        return None
    return result if type(alpha) is int or (type(alpha) is float and result[0][1].is_floating_point) else None


def product(first: torch.Tensor, second: Any) -> Results:
    """The dtype is the higher one of both; of tensors without dims and of numbers only the kind counts."""
    if not isinstance(second, torch.Tensor | int | float):
        return None
    dtype = torch.result_type(first, second)
    shapes = [tuple(value.shape) for value in (first, second) if isinstance(value, torch.Tensor)]
    shape = broadcast(shapes)
    return None if shape is None or dtype.is_complex else [(shape, dtype)]


def quotient(first: torch.Tensor, second: Any) -> Results:
    """As a product, but a floating one also of whole numbers."""
    result = product(first, second)
    if result is None:
        return None
    shape, dtype = result[0]
    return [(shape, dtype if dtype.is_floating_point else torch.get_default_dtype())]


_ATEN: Final = torch.ops.aten
MEASURES: Final[dict[OpOverload, Callable[..., Results]]] = {
    _ATEN.cumsum.default: running,
    _ATEN.cumprod.default: running,
    _ATEN.cummax.default: _running_extreme,
    _ATEN.cummin.default: _running_extreme,
    _ATEN.prod.default: _product,
    _ATEN.prod.dim_int: _product_along,
    _ATEN.var_mean.correction: _two_moments,
    _ATEN.std_mean.correction: _two_moments,
    _ATEN.median.dim: _with_place,
    _ATEN.nanmedian.dim: _with_place,
    _ATEN.mode.default: _with_place,
    _ATEN.kthvalue.default: _kth,
    _ATEN.count_nonzero.default: _num_nonzero,
    _ATEN.count_nonzero.dim_IntList: _num_nonzero,
    _ATEN.norm.ScalarOpt_dim: _norm,
    _ATEN.searchsorted.Tensor: _searched,
    _ATEN.bucketize.Tensor: _bucketized,
    _ATEN.histc.default: _histogram,
    _ATEN.dist.default: _distance,
    _ATEN._cdist_forward.default: _distances,
    _ATEN._cdist_backward.default: _distances_backward,
}
