"""Keys of calls. Two calls whose leading operands have the same spec have equal keys if one plan serves both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from disttrain.dtensor._torch import OpOverload, handle_of
from disttrain.dtensor.dispatch.sizes.size_forms import sized
from disttrain.dtensor.local_part import spec_of
from disttrain.dtensor.spec.layout import Spec

_BY_VALUE = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})

_WITH_SPECS = frozenset({Spec, tuple})
_INTS = {int}
_FLOATS = {float}


class Unkeyed(Exception):
    """An argument that no key can be made of."""


Key = tuple[Any, ...]


def leader_of_list(args: Sequence[Any]) -> Spec | None:
    """The spec of the first tensor in the list that comes first; None where there is no such list, or it is plain."""
    tensors = args[0] if args else None
    return getattr(tensors[0], "_spec", None) if type(tensors) is list and tensors else None


def key_of_call(op: OpOverload, others: Sequence[Any], kwargs: Mapping[str, Any]) -> Key | None:
    """The key of a call whose arguments beside the leading tensor are `others` and `kwargs`; None where an argument is
    of a kind that has none. Of numbers that are no integers it has the type alone."""
    parts: list[Any] = [handle_of(op)]
    try:
        for value in others:
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
    """An argument's part of a key: a tensor's spec, other values themselves, but of floats the type alone."""
    kind = type(value)
    if kind is torch.Tensor and value.ndim == 0:
        return kind, value.dtype
    spec = getattr(value, "_spec", None)
    if spec is not None:
        return spec
    if kind is float or kind is complex:
        return kind
    if kind in _BY_VALUE:
        return kind, value
    if kind is list or kind is tuple:
        return _key_of_list(value)
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return kind, value.dtype
    raise Unkeyed


def _key_of_list(values: Sequence[Any]) -> Any:
    # An optimizer's lists have hundreds of elements; if these are alike, they are not looked at one by one.
    if values and hasattr(values[0], "_spec"):
        try:
            return tuple(map(spec_of, values))
        except AttributeError:
            pass  # there is a plain tensor among them
    if {*map(type, values)} == _FLOATS:
        return float, len(values)
    return tuple(map(key_of, values))


def form_of_key(leader: Spec, key: Key) -> Key | None:
    """The key of a call, whatever the operands' sizes, to be looked up with its leading operand's form; None where an
    operand is cut unevenly, or a call with other sizes may be planned otherwise."""
    shortened = sized(leader, key)
    if shortened is None or _WITH_SPECS.isdisjoint(map(type, shortened)):
        return shortened
    parts = [
        part.form if (kind := type(part)) is Spec else part if kind is not tuple else _form_of_list(part)
        for part in shortened
    ]
    return None if parts.count(None) > shortened.count(None) else tuple(parts)


def _form_of_list(part: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if not part or type(part[0]) is not Spec:
        return part
    forms = tuple([each.form if type(each) is Spec else each for each in part])
    return None if None in forms else forms
