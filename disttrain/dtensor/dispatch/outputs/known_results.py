"""Results of operators that compare, join, look up, order or scatter, by formulas, as in `known_shapes.py`.

Their operands have several dtypes, or lie in lists, and a result may have another dtype. The formulas hold for
operands that lie as new ones do; for all else there is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch

from disttrain.dtensor._torch import OpOverload, same_without_writing
from disttrain.dtensor.dispatch.outputs.known_images import IMAGES
from disttrain.dtensor.dispatch.outputs.known_indexed import INDEXED, INDICES, VIEWS_BACKWARD
from disttrain.dtensor.dispatch.outputs.known_layers import FROM_ANY_GRADIENT, LAYERS
from disttrain.dtensor.dispatch.outputs.known_losses import LOSSES
from disttrain.dtensor.dispatch.outputs.known_measures import MEASURES, combined, floating, product, quotient, without
from disttrain.dtensor.dispatch.outputs.known_pointwise import Result, formula_of, is_in_place, pointwise
from disttrain.dtensor.dispatch.outputs.known_products import PRODUCTS
from disttrain.dtensor.dispatch.outputs.known_resampled import RESAMPLED, RESAMPLED_BACKWARD
from disttrain.dtensor.dispatch.outputs.known_shapes import (
    Shape,
    along,
    broadcast,
    fits,
    is_as_new,
    is_in_order,
    is_size,
    known_outputs,
    reduced,
)
from disttrain.dtensor.spec.shard_sizes import is_permuted

Results = Sequence[Result] | None


def known_results(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, ...] | None:
    """The results for tensors on the meta device, which are shown only; None where torch is to be asked."""
    if op is _ATTENTION:
        return _attention(*args, **kwargs)
    outputs = _new_results(op, args, kwargs)
    return _in_place(op, args, kwargs) if outputs is None else outputs


def _new_results(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, ...] | None:
    formula = RESULTS.get(op)
    generic = formula_of(op) if formula in (None, _whole, combined, product, quotient) else None
    if formula is None and generic is None:
        return None
    for value in (*args, *kwargs.values()):
        for tensor in value if type(value) in (list, tuple) else (value,):
            if isinstance(tensor, torch.Tensor) and not (
                type(tensor) is torch.Tensor
                and all(map(is_size, tensor.shape))
                and (is_as_new(tensor) or _may_lie_otherwise(op, tensor, args, formula))
            ):
                return None
    try:
        results = formula(*args, **kwargs) if formula is not None else None
        if results is None and generic is not None:
            results = generic(args, kwargs)
    except (TypeError, ValueError, IndexError, ZeroDivisionError):  # arguments that it does not know, or mistakes
        return None
    if results is None:
        return None
    return tuple([_shown(*result) if result else torch.empty(0, device="meta") for result in results])


def _may_lie_otherwise(
    op: OpOverload, tensor: torch.Tensor, args: Sequence[Any], formula: Callable[..., Any] | None
) -> bool:
    """True where the result is as new although an operand is not."""
    if op in FROM_ANY:
        return True
    if formula is _written or op in AS_FIRST:
        return tensor is not args[0]  # What is written to stays as it lies, whatever is read.
    if formula is None:
        return is_in_order(tensor) and not (tensor is args[0] and is_in_place(op))
    is_of_any = op in FROM_ANY_GRADIENT or op in RESAMPLED_BACKWARD
    # As a sum's gradient, which is one number for all.
    return is_of_any and tensor is args[0] and (is_in_order(tensor) or not any(tensor.stride()))


def _in_place(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, ...] | None:
    """What an operator in place writes to, if the one that makes a new tensor makes it of that shape, and of a dtype
    that can be written there."""
    if not (is_in_place(op) and args and type(args[0]) is torch.Tensor and _has_places(args[0])):
        return None
    target = args[0]
    if op in FILLS:
        if not target.dtype.is_floating_point:
            return None
    else:
        making = _making(op)
        if making is None:
            return None
        new_args = [_as_new(value) for value in args]
        made = known_outputs(making, new_args, kwargs)
        if made is None:
            made = _new_results(making, new_args, kwargs)
        if made is None or made[0].shape != target.shape or not torch.can_cast(made[0].dtype, target.dtype):
            return None
    return (torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device="meta"),)


def _as_new(value: Any) -> Any:
    if type(value) in (list, tuple):
        return [_as_new(each) for each in value]
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if type(value) is torch.Tensor else value


def _has_places(tensor: torch.Tensor) -> bool:
    """True where each element has a place of its own in memory."""
    extent = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if not is_size(size) or (size > 1 and stride <= extent):
            return False
        extent += (size - 1) * stride
    return True


def _shown(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _kept(*operands: Any, alpha: float = 1, value: float = 1) -> Results:
    result = pointwise(operands)
    # A factor must be of a dtype that the result can have; with floating operands every number is.
    return None if result is None or not result[1].is_floating_point else [result]


def _written(target: torch.Tensor, *others: Any, alpha: float = 1, value: float = 1) -> Results:
    results = _kept(target, *others)
    return results if results and results[0][0] == tuple(target.shape) else None


def _compared(*operands: Any) -> Results:
    result = pointwise(operands)
    return result and [(result[0], torch.bool)]


def _whole(*operands: Any, alpha: float = 1) -> Results:
    """Arithmetic of whole numbers; for others there is `known_shapes.py`."""
    result = pointwise(operands)
    return [result] if result is not None and result[1] in _WHOLE and type(alpha) is int else None


def _bits(*operands: torch.Tensor) -> Results:
    result = pointwise(operands)
    return [result] if result is not None and result[1] in (torch.bool, *_WHOLE) else None


def _where(condition: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> Results:
    if condition.dtype is not torch.bool or first.dtype is not second.dtype:
        return None
    shape = broadcast([tuple(tensor.shape) for tensor in (condition, first, second)])
    return None if shape is None else [(shape, first.dtype)]


def _masked(operand: torch.Tensor, mask: torch.Tensor, value: Any) -> Results:
    shape = tuple(operand.shape)
    if mask.dtype is not torch.bool or mask.ndim > len(shape) or not fits(tuple(mask.shape), shape):
        return None
    if isinstance(value, torch.Tensor):
        is_kept = value.ndim == 0 and value.dtype is operand.dtype
    else:
        is_kept = operand.dtype.is_floating_point and type(value) in (int, float)
    return [(shape, operand.dtype)] if is_kept else None


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> Results:
    first = tensors[0]
    num_dims = first.ndim
    if not -num_dims <= dim < num_dims or any(value.dtype is not first.dtype for value in tensors):
        return None
    dim %= num_dims
    for value in tensors:
        if value.ndim != num_dims or 1 in value.shape:
            return None
        if value.shape[:dim] != first.shape[:dim] or value.shape[dim + 1 :] != first.shape[dim + 1 :]:
            return None
    return [((*first.shape[:dim], sum(value.shape[dim] for value in tensors), *first.shape[dim + 1 :]), first.dtype)]


def _stacked(tensors: Sequence[torch.Tensor], dim: int = 0) -> Results:
    first = tensors[0]
    if not -first.ndim - 1 <= dim <= first.ndim or 1 in first.shape:
        return None
    if any(value.shape != first.shape or value.dtype is not first.dtype for value in tensors):
        return None
    dim %= first.ndim + 1
    return [((*first.shape[:dim], len(tensors), *first.shape[dim:]), first.dtype)]


def _looked_up(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_index: int = -1,
    by_frequency: bool = False,
    sparse: bool = False,
) -> Results:
    if weight.ndim != 2 or indices.dtype not in INDICES:
        return None
    return [((*indices.shape, weight.shape[1]), weight.dtype)]


def _sorted(operand: torch.Tensor, dim: int = -1, descending: bool = False) -> Results:
    if along(operand, dim, False) is None:
        return None
    return [(tuple(operand.shape), operand.dtype), (tuple(operand.shape), torch.int64)]


def _largest(operand: torch.Tensor, k: int, dim: int = -1, largest: bool = True, in_order: bool = True) -> Results:
    if along(operand, dim, False) is None or type(k) is not int or not 0 < k <= operand.shape[dim]:
        return None
    shape = [*operand.shape]
    shape[dim] = k
    return [(tuple(shape), operand.dtype), (tuple(shape), torch.int64)]


def _position(operand: torch.Tensor, dim: int | None = None, keep: bool = False) -> Results:
    shape = without(operand, None if dim is None else [dim], keep)
    return None if shape is None else [(shape, torch.int64)]


def _extreme(operand: torch.Tensor, dims: Sequence[int] = (), keep: bool = False) -> Results:
    shape = without(operand, dims or None, keep)
    return None if shape is None else [(shape, operand.dtype)]


def _moment(
    operand: torch.Tensor, dims: Sequence[int] | None = None, *, correction: Any = 1, keepdim: bool = False
) -> Results:
    return floating(operand, dims or None, keepdim)


def _norm(
    operand: torch.Tensor,
    order: float = 2,
    dims: Sequence[int] | None = None,
    keep: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Results:
    return None if dtype is not None else floating(operand, dims or None, keep)


def _counted(
    operand: torch.Tensor, dims: Sequence[int] | None = None, keep: bool = False, *, dtype: torch.dtype | None = None
) -> Results:
    """The sum of whole numbers."""
    is_whole = operand.dtype is torch.bool or operand.dtype in _WHOLE
    shape = without(operand, dims or None, keep)
    return [(shape, torch.int64)] if is_whole and dtype is None and shape is not None else None


def _truth(operand: torch.Tensor, dim: int | None = None, keep: bool = False) -> Results:
    shape = without(operand, None if dim is None else [dim], keep)
    return None if shape is None or operand.dtype is torch.uint8 else [(shape, torch.bool)]


def _corner(operand: torch.Tensor, diagonal: int = 0) -> Results:
    return [(tuple(operand.shape), operand.dtype)] if operand.ndim >= 2 else None


def _limited(operand: torch.Tensor, least: Any = None, most: Any = None) -> Results:
    return None if least is None and most is None else _kept(operand, least, most)


def _activated(*operands: torch.Tensor, approximate: str = "none") -> Results:
    return _kept(*operands)


def _turned(operand: torch.Tensor, dims: Sequence[int]) -> Results:
    """Flipped, where each dim is given once."""
    return None if reduced(operand, dims or None) is None else [(tuple(operand.shape), operand.dtype)]


def _rolled(operand: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Results:
    return _turned(operand, dims) if dims and len(shifts) == len(dims) else None


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any, **keywords: Any
) -> tuple[torch.Tensor, ...] | None:
    """The result, which lies as the query does, whatever the order of its dims, and the logarithms of sums."""
    operands = (query, key, value)
    if any(type(each) is not torch.Tensor or each.ndim != 4 or each.dtype is not query.dtype for each in operands):
        return None
    if not all(map(is_size, (*query.shape, *key.shape))) or query.dtype not in (torch.float32, torch.float64):
        return None
    batch, heads, length, width = query.shape
    if key.shape != value.shape or (*key.shape[:2], key.shape[3]) != (batch, heads, width):
        return None
    if not is_as_new(query) and (1 in query.shape or not is_permuted(query.shape, query.stride())):
        return None
    result = torch.empty_strided(query.shape, query.stride(), dtype=query.dtype, device="meta")
    sums = torch.empty((batch, length, heads), dtype=query.dtype, device="meta").transpose(1, 2)
    return result, sums


_making: Final = cache(same_without_writing)
_ATEN: Final = torch.ops.aten
_ATTENTION: Final[OpOverload] = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
_WHOLE: Final = (torch.int64, torch.int32)
FROM_ANY: Final = frozenset(
    {
        *VIEWS_BACKWARD,
        *PRODUCTS,
        *LOSSES,
        *(_ATEN.im2col.default, _ATEN.col2im.default, _ATEN.repeat.default, _ATEN.take.default),
        *(_ATEN.grid_sampler_2d.default, _ATEN.grid_sampler_3d.default),
        _ATEN.max_unpool3d.default,  # not of two dims, which keeps channels last
        *(_ATEN.tril.default, _ATEN.triu.default, _ATEN._softmax_backward_data.default),
        *(_ATEN.scatter.value, _ATEN.scatter.src, _ATEN.scatter_add.default, _ATEN.gather.default),
    }
)
"""Operators whose result is as new, however their operands lie."""
AS_FIRST: Final = frozenset(
    {
        *(_ATEN.index_put.default, _ATEN.index_copy.default, _ATEN.index_add.default, _ATEN.index_fill.int_Scalar),
        *(_ATEN.masked_scatter.default, _ATEN.masked_fill.Scalar, _ATEN.masked_fill.Tensor),
    }
)
"""Operators whose result lies as the first operand does, however others lie."""
FILLS: Final = frozenset(
    {
        *(getattr(_ATEN, name).default for name in ("zero_", "normal_", "uniform_", "exponential_", "geometric_")),
        *(getattr(_ATEN, name).default for name in ("cauchy_", "log_normal_")),
        *(_ATEN.fill_.Scalar, _ATEN.bernoulli_.float),
    }
)
"""Operators in place that look at nothing but numbers."""
_COMPARISONS: Final = ("eq", "ne", "lt", "le", "gt", "ge")
OF_SAMPLES: Final = frozenset({**INDEXED, **IMAGES, **PRODUCTS}) | {
    _ATEN.nll_loss2d_forward.default,
    _ATEN.nll_loss2d_backward.default,
}
"""Operators whose formulas are held against torch's samples of calls."""
RESULTS: Final[dict[OpOverload, Callable[..., Sequence[Result | None] | None]]] = {
    **{getattr(getattr(_ATEN, name), of): _compared for name in _COMPARISONS for of in ("Scalar", "Tensor")},
    **{getattr(_ATEN, f"bitwise_{name}").Tensor: _bits for name in ("and", "or", "xor")},
    **{
        getattr(_ATEN, name).default: _compared
        for name in ("isnan", "logical_not", "logical_and", "logical_or", "logical_xor")
    },
    **{getattr(_ATEN, name).default: _kept for name in ("reciprocal", "floor", "round", "sign", "addcmul", "addcdiv")},
    **{getattr(_ATEN, name).Scalar: _kept for name in ("rsub", "lerp")},
    **{getattr(_ATEN, f"{name}_").Scalar: _written for name in ("add", "div", "mul", "sub", "lerp")},
    **{getattr(_ATEN, f"{name}_").Tensor: _written for name in ("add", "sub")},
    **{getattr(_ATEN, f"{name}_").default: _written for name in ("addcmul", "addcdiv", "clamp", "sqrt", "exp", "neg")},
    **{getattr(_ATEN, f"masked_fill{end}").Scalar: _masked for end in ("", "_")},
    **{getattr(_ATEN, f"masked_fill{end}").Tensor: _masked for end in ("", "_")},
    **{getattr(_ATEN, name).default: _position for name in ("argmax", "argmin")},
    **{getattr(_ATEN, name).default: _extreme for name in ("amax", "amin")},
    **{getattr(_ATEN, name).correction: _moment for name in ("var", "std")},
    **{getattr(getattr(_ATEN, name), of): _truth for name in ("any", "all") for of in ("default", "dim")},
    **{getattr(_ATEN, name).default: _corner for name in ("tril", "triu")},
    _ATEN.remainder.Tensor: _whole,
    _ATEN.add.Tensor: combined,
    _ATEN.sub.Tensor: combined,
    _ATEN.mul.Tensor: product,
    _ATEN.div.Tensor: quotient,
    _ATEN.abs.default: _whole,
    _ATEN.neg.default: _whole,
    _ATEN.remainder.Scalar: _whole,
    _ATEN.floor_divide.default: _whole,
    _ATEN.bitwise_not.default: _bits,
    _ATEN.clamp.default: _limited,
    _ATEN.clamp_min.default: _kept,
    _ATEN.cat.default: _joined,
    _ATEN.stack.default: _stacked,
    _ATEN.where.self: _where,
    _ATEN.embedding.default: _looked_up,
    **LOSSES,
    **INDEXED,
    **IMAGES,
    **PRODUCTS,
    **LAYERS,
    **MEASURES,
    **RESAMPLED,
    _ATEN.flip.default: _turned,
    _ATEN.roll.default: _rolled,
    _ATEN.gelu.default: _activated,
    _ATEN.gelu_backward.default: _activated,
    _ATEN.sort.default: _sorted,
    _ATEN.topk.default: _largest,
    _ATEN.logsumexp.default: floating,
    _ATEN.linalg_vector_norm.default: _norm,
    _ATEN.sum.default: _counted,
    _ATEN.sum.dim_IntList: _counted,
}
