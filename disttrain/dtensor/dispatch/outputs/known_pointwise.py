"""Results of pointwise operators by one formula for all of them: where all tensors have one floating dtype, the result
has it too, and the shape to which they are broadcast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch

from disttrain.dtensor._torch import OpOverload, facts_of
from disttrain.dtensor.dispatch.outputs.known_shapes import Shape, broadcast

Result = tuple[Shape, torch.dtype]

_WHOLE: Final = (torch.int64, torch.int32)
_OF_TRUTH: Final = frozenset(
    f"aten.{name}"
    for name in (
        *("eq", "ne", "lt", "le", "gt", "ge", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "signbit"),
        *("logical_and", "logical_not", "logical_or", "logical_xor"),
    )
)
"""Operators whose results are booleans."""
_OTHERWISE: Final = frozenset(
    f"aten.{name}"
    for name in ("_to_copy", "clone", "complex", "conj_physical", "float_power", "frexp", "polar", "positive")
)
"""Pointwise ones whose result has another dtype, or lies otherwise."""
_UNTAGGED: Final = frozenset(
    f"aten.{name}"
    for name in (
        *("_prelu_kernel", "abs", "copysign", "elu_backward", "hardshrink_backward", "hardsigmoid_backward"),
        *("hardswish", "hardswish_backward", "hardtanh_backward", "heaviside", "leaky_relu_backward"),
        *("log_sigmoid_backward", "mish", "mish_backward", "rsub", "softplus_backward", "softshrink_backward"),
        *("special_erfcx", "special_i0e", "special_ndtr", "threshold"),
    )
)
"""Pointwise as well, though torch does not tag them so."""
_NUMBERS: Final = frozenset({int, float, bool, type(None)})


def pointwise(operands: Sequence[Any]) -> Result | None:
    """The shape of the tensors broadcast, and their dtype, if it is one and a number among them does not change it."""
    tensors = [value for value in operands if isinstance(value, torch.Tensor)]
    numbers = [value for value in operands if not isinstance(value, torch.Tensor)]
    if not tensors:
        return None
    dtype = tensors[0].dtype
    if any(tensor.dtype is not dtype for tensor in tensors) or not all(_is_kept(dtype, number) for number in numbers):
        return None
    shape = broadcast([tuple(tensor.shape) for tensor in tensors])
    return None if shape is None else (shape, dtype)


def _is_kept(dtype: torch.dtype, number: Any) -> bool:
    if number is None or type(number) is bool:
        return True
    return type(number) in (int, float) and (dtype.is_floating_point or (type(number) is int and dtype in _WHOLE))


@cache
def is_in_place(op: OpOverload) -> bool:
    """True if its result is its first argument, which it writes to."""
    return facts_of(op).is_inplace


@cache
def formula_of(op: OpOverload) -> Callable[[Sequence[Any], Mapping[str, Any]], Sequence[Result] | None] | None:
    """The formula of a pointwise operator with one result; None where there is none."""
    facts = facts_of(op)
    name = facts.name.removesuffix("_") if facts.is_inplace else facts.name
    is_pointwise = facts.is_pointwise or name in _UNTAGGED
    if not is_pointwise or name in _OTHERWISE or len(facts.returned) != 1 or facts.returns_list or facts.returns_data:
        return None
    if facts.mutated and not facts.is_inplace:
        return None

    def formula(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Result] | None:
        if not _NUMBERS.issuperset(map(type, kwargs.values())):
            return None
        result = pointwise(args)
        if result is None or not result[1].is_floating_point:
            return None
        if facts.is_inplace:
            return [result] if result[0] == tuple(args[0].shape) else None
        return [(result[0], torch.bool if name in _OF_TRUTH else result[1])]

    return formula
