"""Shapes and strides of views by formulas: a call of torch's own kernel for shapes takes as long as the view itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from disttrain.dtensor._torch import OpOverload
from disttrain.dtensor.spec.index_range import IndexRange

View = tuple[tuple[int, ...], tuple[int, ...]]
"""A shape and its strides."""


def views_of(op: OpOverload, shape: Sequence[int], stride: Sequence[int], args: Sequence[Any]) -> list[View] | None:
    """The views that `op` makes of a tensor of this shape and stride; None where there is no formula, or a mistake."""
    formula = _FORMULAS.get(op)
    if formula is None:
        return None
    views = formula(list(shape), list(stride), *args)
    return None if views is None else [(tuple(sizes), tuple(strides)) for sizes, strides in views]


_Views = Sequence[tuple[Sequence[int], Sequence[int]]] | None


def _nonnegative(dim: int, num_dims: int) -> int | None:
    return dim % num_dims if -num_dims <= dim < num_dims else None


def _same(shape: list[int], stride: list[int]) -> _Views:
    return [(shape, stride)]


def _transposed(shape: list[int], stride: list[int], first: int = 0, second: int = 1) -> _Views:
    dims = _nonnegative(first, len(shape)), _nonnegative(second, len(shape))
    if dims[0] is None or dims[1] is None:
        return None
    for values in (shape, stride):
        values[dims[0]], values[dims[1]] = values[dims[1]], values[dims[0]]
    return [(shape, stride)]


def _t(shape: list[int], stride: list[int]) -> _Views:
    return [(shape[::-1], stride[::-1])] if len(shape) <= 2 else None


def _permuted(shape: list[int], stride: list[int], dims: Sequence[int]) -> _Views:
    num_dims = len(shape)
    positions = [_nonnegative(dim, num_dims) for dim in dims]
    order = [position for position in positions if position is not None]
    if sorted(order) != list(range(num_dims)) or len(order) != len(positions):
        return None
    return [([shape[dim] for dim in order], [stride[dim] for dim in order])]


def _unsqueezed(shape: list[int], stride: list[int], dim: int) -> _Views:
    position = _nonnegative(dim, len(shape) + 1)
    if position is None:
        return None
    step = shape[position] * stride[position] if position < len(shape) else 1
    return [([*shape[:position], 1, *shape[position:]], [*stride[:position], step, *stride[position:]])]


def _selected(shape: list[int], stride: list[int], dim: int, index: int) -> _Views:
    position = _nonnegative(dim, len(shape))
    if position is None or type(index) is not int or not -shape[position] <= index < shape[position]:
        return None
    del shape[position], stride[position]
    return [(shape, stride)]


def _sliced(
    shape: list[int],
    stride: list[int],
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> _Views:
    position = _nonnegative(dim, len(shape))
    if position is None or step <= 0:
        return None
    shape[position] = IndexRange.of_slice(shape[position], start, end, step).length
    stride[position] *= step
    return [(shape, stride)]


def _split(shape: list[int], stride: list[int], size: int, dim: int = 0) -> _Views:
    position = _nonnegative(dim, len(shape))
    if position is None or size <= 0 or shape[position] <= 0:
        return None
    sizes = [min(size, shape[position] - begin) for begin in range(0, shape[position], size)]
    return _split_into(shape, stride, sizes, dim)


def _split_into(shape: list[int], stride: list[int], sizes: Sequence[int], dim: int = 0) -> _Views:
    position = _nonnegative(dim, len(shape))
    if position is None or min(sizes, default=0) < 0 or sum(sizes) != shape[position]:
        return None
    return [([*shape[:position], size, *shape[position + 1 :]], stride) for size in sizes]


def _expanded(shape: list[int], stride: list[int], size: Sequence[int]) -> _Views:
    num_new = len(size) - len(shape)
    if num_new < 0 or not shape or min(size) < -1:
        return None
    sizes, strides = [*size], [0] * num_new + stride
    for dim in range(len(size) - 1, -1, -1):
        if dim < num_new:
            if sizes[dim] < 0:
                return None
            # Of one element it lies as a dim around the next one would.
            strides[dim] = sizes[dim + 1] * strides[dim + 1] if sizes[dim] == 1 else 0
            continue
        length = shape[dim - num_new]
        if sizes[dim] in (-1, length):
            sizes[dim] = length
        elif length == 1:
            strides[dim] = 0
        else:
            return None
    return [(sizes, strides)]


_ATEN: Final = torch.ops.aten
_FORMULAS: Final[dict[OpOverload, Callable[..., _Views]]] = {
    _ATEN.alias.default: _same,
    _ATEN.detach.default: _same,
    _ATEN.expand.default: _expanded,
    _ATEN.permute.default: _permuted,
    _ATEN.select.int: _selected,
    _ATEN.slice.Tensor: _sliced,
    _ATEN.split.Tensor: _split,
    _ATEN.split_with_sizes.default: _split_into,
    _ATEN.t.default: _t,
    _ATEN.transpose.int: _transposed,
    _ATEN.unsqueeze.default: _unsqueezed,
}
