"""Results of frequent operators, by formulas in place of torch's kernels for the meta device.

Those kernels are Python: each takes up to a millisecond, and the first of them loads sympy and Dynamo, which takes a
second. The formulas hold for the usual: contiguous operands of one floating dtype. For all else, mistakes among it,
there is None, and torch answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import torch

from disttrain.dtensor._torch import OpOverload
from disttrain.dtensor.spec.shard_sizes import contiguous_strides, is_permuted

Shape = tuple[int, ...]
Shapes = Sequence[Shape | None] | None
"""Of each result, which is contiguous and of the operands' dtype; None for one that is not made."""

WIDE: Final = (torch.float32, torch.float64)
"""Dtypes that no kernel widens to compute with."""


def known_outputs(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, ...] | None:
    """The results for tensors on the meta device, which are shown only; None where torch is to be asked."""
    formula = FORMULAS.get(op)
    if formula is None or not _AS_IF_LEFT_OUT.issuperset(kwargs.values()):
        return None
    strides = _common_strides(args) if formula is _same else None
    dtype = None
    for value in args:
        if isinstance(value, torch.Tensor):
            dtype = dtype or value.dtype
            # A subclass, or sizes that are a compiler's symbols, may be more than they look.
            if type(value) is not torch.Tensor or value.dtype is not dtype or not all(map(is_size, value.shape)):
                return None
            if op not in _FROM_ANY and not (strides or is_as_new(value) or (formula is _same and is_in_order(value))):
                return None
    if dtype is None or not dtype.is_floating_point:
        return None
    shapes = formula(*args)
    if shapes is None:
        return None
    if strides is not None:
        return (torch.empty_strided(tuple(args[0].shape), strides, dtype=dtype, device="meta"),)
    return tuple(
        [
            torch.empty(0, device="meta") if shape is None else torch.empty(shape, dtype=dtype, device="meta")
            for shape in shapes
        ]
    )


def _common_strides(args: Sequence[Any]) -> Shape | None:
    """The strides that all tensors have, whose shape is one: as new ones have them, but for the order of the dims."""
    kinds = {(tuple(value.shape), value.stride()) for value in args if isinstance(value, torch.Tensor)}
    if len(kinds) != 1:
        return None
    ((shape, strides),) = kinds
    is_dense = all(map(is_size, shape)) and 1 not in shape and is_permuted(shape, strides)
    return strides if is_dense else None


def is_size(size: Any) -> bool:
    return type(size) is int and size > 0


def is_as_new(tensor: torch.Tensor) -> bool:
    """True for the strides that a new tensor has; those of `is_contiguous` may differ where a dim has one element."""
    return tensor.stride() == contiguous_strides(tensor.shape)


def is_in_order(tensor: torch.Tensor) -> bool:
    """True where no dim lies within a later one, so that what is computed of each element is as new."""
    strides = [stride for stride in tensor.stride() if stride]
    return 1 not in tensor.shape and all(outer > inner for outer, inner in pairwise(strides))


def _same(first: torch.Tensor, *others: Any) -> Shapes:
    """Of elements at the same place; an operand may be broadcast to another, which has no dim of size one then."""
    shapes = [tuple(value.shape) for value in (first, *others) if isinstance(value, torch.Tensor)]
    if not all(isinstance(value, torch.Tensor | int | float) for value in others):
        return None
    largest = broadcast(shapes)
    return None if largest is None else (largest,)


def broadcast(shapes: Sequence[Shape]) -> Shape | None:
    """The shape that operands are broadcast to; None where they cannot be, or what lies so is not surely as new."""
    largest = max(shapes, key=len)
    # A tensor without dims is broadcast to any shape, and says nothing of an order.
    shapes = [shape for shape in shapes if shape]
    if all(shape == largest for shape in shapes):
        return largest
    sizes = [{1} for _ in largest]
    for shape in shapes:
        for of_dim, size in zip(reversed(sizes), reversed(shape), strict=False):
            of_dim.add(size)
    if any(len(of_dim) != 2 for of_dim in sizes):
        return None
    return tuple([size for of_dim in sizes for size in of_dim - {1}])


def fits(shape: Shape, largest: Shape) -> bool:
    """Whether `shape` can be broadcast to `largest`."""
    return all(size in (1, whole) for size, whole in zip(reversed(shape), reversed(largest), strict=False))


def _written(target: torch.Tensor, *others: Any) -> Shapes:
    shapes = _same(target, *others)
    return shapes if shapes and shapes[0] == tuple(target.shape) else None


def _mm(left: torch.Tensor, right: torch.Tensor) -> Shapes:
    if left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[0]:
        return None
    return ((left.shape[0], right.shape[1]),)


def _addmm(added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *factors: Any) -> Shapes:
    shapes = _mm(left, right)
    if factors or not shapes or shapes[0] is None or len(added.shape) > 2 or not is_as_new(added):
        return None
    return shapes if fits(tuple(added.shape), shapes[0]) else None


def _bmm(left: torch.Tensor, right: torch.Tensor) -> Shapes:
    if left.dim() != 3 or right.dim() != 3 or left.shape[0] != right.shape[0] or left.shape[2] != right.shape[1]:
        return None
    return ((left.shape[0], left.shape[1], right.shape[2]),)


def _rows_of(operand: torch.Tensor, normalized: Sequence[int], *vectors: torch.Tensor | None) -> Shape | None:
    """The shape of the statistics of a norm over the last dims."""
    num_rows = len(operand.shape) - len(normalized)
    shape = [*normalized]
    if num_rows < 0 or not shape or [*operand.shape[num_rows:]] != shape or operand.dtype not in WIDE:
        return None
    if any(vector is not None and [*vector.shape] != shape for vector in vectors):
        return None
    return (*operand.shape[:num_rows], *[1] * len(shape))


def _layer_norm(operand: torch.Tensor, normalized: Sequence[int], weight: Any, bias: Any, _: float) -> Shapes:
    rows = _rows_of(operand, normalized, weight, bias)
    return None if rows is None else (tuple(operand.shape), rows, rows)


def _layer_norm_backward(
    grad: torch.Tensor, operand: torch.Tensor, normalized: Sequence[int], mean: Any, rstd: Any, *more: Any
) -> Shapes:
    weight, bias, wanted = more
    rows = _rows_of(operand, normalized, weight, bias)
    if rows is None or grad.shape != operand.shape or tuple(mean.shape) != rows or tuple(rstd.shape) != rows:
        return None
    if not all(value is None or is_as_new(value) for value in (operand, mean, rstd, weight, bias)):
        return None
    shapes = (tuple(operand.shape), tuple(normalized), tuple(normalized))
    operands = (operand, weight, bias)
    if not any(wanted) or any(is_wanted and value is None for is_wanted, value in zip(wanted, operands, strict=True)):
        return None
    return tuple(shape if is_wanted else None for shape, is_wanted in zip(shapes, wanted, strict=True))


def along(operand: torch.Tensor, dim: int, to_float: bool) -> Shapes:
    """Of operators that look along a dim, and keep the shape."""
    return (tuple(operand.shape),) if operand.shape and -operand.dim() <= dim < operand.dim() and not to_float else None


def _along_backward(grad: torch.Tensor, result: torch.Tensor, dim: int, dtype: torch.dtype) -> Shapes:
    return along(result, dim, dtype is not result.dtype) if grad.shape == result.shape else None


def reduced(operand: torch.Tensor, dims: Sequence[int] | None = None, keep: bool = False) -> Shapes:
    num_dims = operand.dim()
    if dims is None:
        return ((1,) * num_dims if keep else (),)
    if not dims or not all(-num_dims <= dim < num_dims for dim in dims):
        return None
    gone = {dim % num_dims for dim in dims}
    if len(gone) != len(dims):
        return None
    sizes = enumerate(operand.shape)
    return (tuple([1 if dim in gone else size for dim, size in sizes if keep or dim not in gone]),)


def _view(operand: torch.Tensor, size: Sequence[int]) -> Shapes:
    if not all(type(length) is int for length in size) or min(size, default=1) < -1:
        return None
    num_elements, known_size = operand.numel(), math.prod(length for length in size if length != -1)
    if size.count(-1) > 1 or not known_size or num_elements % known_size:
        return None
    shape = tuple([num_elements // known_size if length == -1 else length for length in size])
    return (shape,) if math.prod(shape) == num_elements else None


_ATEN: Final = torch.ops.aten
_UNARY: Final = ("abs", "cos", "exp", "log", "neg", "relu", "rsqrt", "sigmoid", "silu", "sin", "sqrt", "tanh")
_AS_IF_LEFT_OUT: Final = frozenset({None, False, torch.preserve_format})
"""Values of keywords that change nothing."""
_FROM_ANY: Final = frozenset(
    {_ATEN.addmm.default, _ATEN.bmm.default, _ATEN.mm.default, _ATEN.native_layer_norm_backward.default}
)
"""Operators whose result is contiguous, whatever the strides of its factors or of a gradient."""
FORMULAS: Final[dict[OpOverload, Callable[..., Shapes]]] = {
    **{getattr(_ATEN, name).default: _same for name in _UNARY},
    **{getattr(_ATEN, name).default: _same for name in ("maximum", "minimum")},
    **{getattr(_ATEN, f"{name}_backward").default: _same for name in ("sigmoid", "silu", "tanh", "threshold", "gelu")},
    **{getattr(_ATEN, name).Tensor: _same for name in ("add", "div", "mul", "sub")},
    **{getattr(_ATEN, name).Scalar: _same for name in ("add", "div", "mul", "sub")},
    **{getattr(_ATEN, f"{name}_").Tensor: _written for name in ("add", "div", "mul", "sub")},
    **{getattr(_ATEN, f"{name}_like").default: _same for name in ("empty", "ones", "rand", "randn", "zeros")},
    _ATEN.gelu.default: _same,
    _ATEN.pow.Tensor_Scalar: _same,
    _ATEN.mm.default: _mm,
    _ATEN.addmm.default: _addmm,
    _ATEN.bmm.default: _bmm,
    _ATEN.native_layer_norm.default: _layer_norm,
    _ATEN.native_layer_norm_backward.default: _layer_norm_backward,
    _ATEN._softmax.default: along,
    _ATEN._log_softmax.default: along,
    _ATEN._softmax_backward_data.default: _along_backward,
    _ATEN._log_softmax_backward_data.default: _along_backward,
    _ATEN.sum.default: reduced,
    _ATEN.sum.dim_IntList: reduced,
    _ATEN.mean.default: reduced,
    _ATEN.mean.dim: reduced,
    _ATEN.view.default: _view,
    _ATEN._unsafe_view.default: _view,
}
