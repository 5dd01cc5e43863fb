"""What of a call its plan depends on, as something to look up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch

from disttrain.dtensor._torch import OpOverload, handle_of

_BY_VALUE = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})

_INTS = {int}
_spec_of = attrgetter("_spec")


class Unkeyed(Exception):
    """An argument that no key can be made of."""


def key_of_call(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> tuple[Any, ...] | None:
    """What of a call its plan depends on beside its first argument's spec; None where no key can be made."""
    parts: list[Any] = [handle_of(op)]
    try:
        for value in args[1:]:
            kind = type(value)
            if kind in _BY_VALUE:
                parts += (kind, value)
            elif kind is list and {*map(type, value)} == _INTS:
                parts.append((*value,))
            else:
                parts.append(key_of(value))
        if kwargs:
            parts += kwargs
            parts += map(key_of, kwargs.values())
    except Unkeyed:
        return None
    return tuple(parts)


def key_of(value: Any) -> Any:
    """What of an argument a plan depends on: a tensor's spec, other values themselves, but of floats the type alone."""
    kind = type(value)
    spec = getattr(value, "_spec", None)
    if spec is not None:
        return spec
    if kind is float or kind is complex:
        return kind
    if kind in _BY_VALUE:
        return kind, value
    if kind is list or kind is tuple:
        if value and all(map(hasattr, value, repeat("_spec"))):
            return (*map(_spec_of, value),)
        return tuple([key_of(item) for item in value])
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return kind, value.dtype
    raise Unkeyed


def form_of_call(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """As the key of a call, but whatever the sizes of its operands; None where an operand's cut is uneven."""
    parts: list[Any] = [handle_of(op)]
    try:
        for value in args:
            spec = getattr(value, "_spec", None)
            if spec is None:
                parts.append(key_of(value))
            elif spec.form is None:
                return None
            else:
                parts.append(spec.form)
        if kwargs:
            parts += kwargs
            parts += map(key_of, kwargs.values())
    except Unkeyed:
        return None
    return tuple(parts)
