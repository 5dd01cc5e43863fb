"""Results of operators that read or write some places of a tensor, by formulas, as in `known_results.py`: by indices,
by masks, and the gradients of views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from disttrain.dtensor._torch import OpOverload
from disttrain.dtensor.dispatch.outputs.known_pointwise import Result
from disttrain.dtensor.dispatch.outputs.known_shapes import Shape, along, broadcast, fits
from disttrain.dtensor.spec.index_range import IndexRange

Results = Sequence[Result] | None

INDICES: Final = (torch.int64, torch.int32)


def _as_shown(operand: torch.Tensor) -> Results:
    return [(tuple(operand.shape), operand.dtype)]


def _whole(grad: torch.Tensor, sizes: Sequence[int], viewed: Sequence[int]) -> Results:
    """The gradient of a tensor of `sizes`, of which a view has the gradient `grad`."""
    is_known = all(type(size) is int and size > 0 for size in sizes)
    return [(tuple(sizes), grad.dtype)] if is_known and [*grad.shape] == [*viewed] else None


def _select_backward(grad: torch.Tensor, sizes: Sequence[int], dim: int, index: int) -> Results:
    num_dims = len(sizes)
    if not -num_dims <= dim < num_dims or not -sizes[dim] <= index < sizes[dim]:
        return None
    return _whole(grad, sizes, [size for at, size in enumerate(sizes) if at != dim % num_dims])


def _slice_backward(grad: torch.Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Results:
    num_dims = len(sizes)
    if not -num_dims <= dim < num_dims or step <= 0:
        return None
    viewed = [*sizes]
    viewed[dim] = IndexRange.of_slice(sizes[dim], start, end, step).length
    return _whole(grad, sizes, viewed)


def _diagonal_backward(grad: torch.Tensor, sizes: Sequence[int], offset: int, first: int, second: int) -> Results:
    num_dims = len(sizes)
    if not all(-num_dims <= dim < num_dims for dim in (first, second)) or first % num_dims == second % num_dims:
        return None
    rows, columns = sizes[first], sizes[second]
    length = min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns)
    others = [size for at, size in enumerate(sizes) if at not in (first % num_dims, second % num_dims)]
    return _whole(grad, sizes, [*others, max(length, 0)])


def _unfold_backward(grad: torch.Tensor, sizes: Sequence[int], dim: int, size: int, step: int) -> Results:
    num_dims = len(sizes)
    if not -num_dims <= dim < num_dims or step <= 0 or not 0 < size <= sizes[dim]:
        return None
    viewed = [*sizes, size]
    viewed[dim % num_dims] = (sizes[dim] - size) // step + 1
    return _whole(grad, sizes, viewed)


def indexed_shape(operand: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Shape | None:
    """The shape of `operand[indices]`. Indices are broadcast; their dims come first where others stand between."""
    given = [at for at, index in enumerate(indices) if index is not None]
    if not given or len(indices) > operand.ndim:
        return None
    tensors = [index for index in indices if index is not None]
    if any(index.dtype not in INDICES for index in tensors):
        return None
    chosen = broadcast([tuple(index.shape) for index in tensors])
    if chosen is None:
        return None
    kept = [size for at, size in enumerate(operand.shape) if at not in given]
    num_before = given[0] if given == [*range(given[0], given[0] + len(given))] else 0
    return (*kept[:num_before], *chosen, *kept[num_before:])


def _indexed(operand: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Results:
    shape = indexed_shape(operand, indices)
    if shape is None:
        return None
    # Of a dim of one, with those around it, it cannot be seen in which order they lie.
    is_ordered = (indices[0] is not None and len(indices) == 1) or 1 not in operand.shape
    return [(shape, operand.dtype)] if is_ordered else None


def _put(
    operand: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> Results:
    shape = indexed_shape(operand, indices)
    if shape is None or values.dtype is not operand.dtype or values.ndim > len(shape):
        return None
    return _as_shown(operand) if fits(tuple(values.shape), shape) else None


def _at(operand: torch.Tensor, dim: int, index: torch.Tensor) -> Shape | None:
    """The shape of what stands along `dim` at the places that a list of indices names."""
    if along(operand, dim, False) is None or index.dtype not in INDICES or index.ndim != 1:
        return None
    shape = [*operand.shape]
    shape[dim] = index.shape[0]
    return tuple(shape)


def _copied_at(operand: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Results:
    if index.dtype is not torch.int64 or source.dtype is not operand.dtype:
        return None
    return _as_shown(operand) if _at(operand, dim, index) == tuple(source.shape) else None


def _filled_at(operand: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> Results:
    is_kept = operand.dtype.is_floating_point and type(value) in (int, float)
    return _as_shown(operand) if is_kept and index.dtype is torch.int64 and _at(operand, dim, index) else None


def _taken(operand: torch.Tensor, index: torch.Tensor) -> Results:
    return [(tuple(index.shape), operand.dtype)] if index.dtype is torch.int64 else None


def _masked_scattered(operand: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> Results:
    shape = tuple(operand.shape)
    is_right = mask.dtype is torch.bool and source.dtype is operand.dtype and mask.ndim <= len(shape)
    return _as_shown(operand) if is_right and fits(tuple(mask.shape), shape) else None


def _gathered(operand: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False) -> Results:
    return [(tuple(index.shape), operand.dtype)] if _points_into(operand, dim, index) else None


def _points_into(operand: torch.Tensor, dim: int, index: torch.Tensor) -> bool:
    if along(operand, dim, False) is None or index.dtype is not torch.int64 or index.ndim != operand.ndim:
        return False
    sizes = enumerate(zip(index.shape, operand.shape, strict=True))
    return all(size <= whole for position, (size, whole) in sizes if position != dim % operand.ndim)


def _scattered(operand: torch.Tensor, dim: int, index: torch.Tensor, source: Any) -> Results:
    if not _points_into(operand, dim, index):
        return None
    if isinstance(source, torch.Tensor):
        if source.dtype is not operand.dtype or source.ndim != index.ndim:
            return None
        if any(size > whole for size, whole in zip(index.shape, source.shape, strict=True)):
            return None
    return [(tuple(operand.shape), operand.dtype)]


def _added_at(
    operand: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> Results:
    if along(operand, dim, False) is None or index.dtype not in INDICES or index.ndim != 1:
        return None
    shape = [*operand.shape]
    shape[dim] = index.shape[0]
    if [*source.shape] != shape or source.dtype is not operand.dtype or not operand.dtype.is_floating_point:
        return None
    return [(tuple(operand.shape), operand.dtype)]


_ATEN: Final = torch.ops.aten
VIEWS_BACKWARD: Final[dict[OpOverload, Callable[..., Results]]] = {
    _ATEN.select_backward.default: _select_backward,
    _ATEN.slice_backward.default: _slice_backward,
    _ATEN.diagonal_backward.default: _diagonal_backward,
    _ATEN.unfold_backward.default: _unfold_backward,
}
INDEXED: Final[dict[OpOverload, Callable[..., Results]]] = {
    **VIEWS_BACKWARD,
    _ATEN.index.Tensor: _indexed,
    _ATEN.index_put.default: _put,
    _ATEN.index_copy.default: _copied_at,
    _ATEN.index_fill.int_Scalar: _filled_at,
    _ATEN.take.default: _taken,
    _ATEN.gather.default: _gathered,
    _ATEN.scatter.value: _scattered,
    _ATEN.scatter.src: _scattered,
    _ATEN.scatter_add.default: _scattered,
    _ATEN.index_add.default: _added_at,
    _ATEN.masked_scatter.default: _masked_scattered,
}
