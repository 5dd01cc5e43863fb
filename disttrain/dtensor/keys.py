"""What of a call its plan depends on, as something to look up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from disttrain.dtensor._torch import OpOverload

_BY_VALUE = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


class Unkeyed(Exception):
    """An argument that no key can be made of."""


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
        return tuple([key_of(item) for item in value])
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return kind, value.dtype
    raise Unkeyed


def form_of_call(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """As the key of a call, but whatever the sizes of its operands; None where an operand's cut is uneven."""
    try:
        return (op, *map(_form_of, args), *kwargs, *map(_form_of, kwargs.values()))
    except Unkeyed:
        return None


def _form_of(value: Any) -> Any:
    spec = getattr(value, "_spec", None)
    if spec is None:
        return key_of(value)
    if spec.form is None:
        raise Unkeyed
    return spec.form
