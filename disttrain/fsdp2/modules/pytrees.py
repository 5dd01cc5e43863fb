"""Nests of tuples, lists, dicts and dataclasses, as modules take and return them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from types import NoneType
from typing import Any, Final

import torch

from disttrain.fsdp2._torch import are_same

_SEQUENCES: Final = (tuple, list)
_CONTAINERS: Final = (tuple, list, dict)
_WITHOUT_TENSORS: Final = (torch.Tensor, NoneType, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Types that contain no tensors, or have been handled."""


def cast_floats(values: Any, dtype: torch.dtype) -> Any:
    """The same nest with its floating-point tensors in `dtype`."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype is not dtype and tensor.is_floating_point() else tensor

    return for_each_tensor(values, cast)


def for_each_tensor(values: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The nest of tuples, lists, dicts and dataclasses with `function` applied to its tensors, in order.

    A container in which nothing changes is passed on as it is, since a module may want to write to it.
    """
    if isinstance(values, torch.Tensor):
        return function(values)
    if isinstance(values, _SEQUENCES):
        places = [
            function(value) if isinstance(value, torch.Tensor) else for_each_tensor(value, function) for value in values
        ]
        if are_same(places, values):
            return values
        if isinstance(values, list):
            return places
        return type(values)(*places) if hasattr(values, "_fields") else tuple(places)
    items = items_of(values)
    if not items:
        return values
    mapped = {key: for_each_tensor(value, function) for key, value in items.items()}
    if are_same(mapped.values(), items.values()):
        return values
    # A subclass of dict, or a dataclass, may have more to it than its items.
    changed = copy.copy(values)
    for key, value in mapped.items():
        if isinstance(changed, dict):
            changed[key] = value
        else:
            object.__setattr__(changed, key, value)
    return changed


def may_hide_tensors(values: Any) -> bool:
    """True where the nest has a value in which we look for none, such as an object of the user's own class."""
    if isinstance(values, _WITHOUT_TENSORS):
        return False
    items = items_of(values)
    return any(map(may_hide_tensors, items.values())) if items or isinstance(values, _CONTAINERS) else True


def items_of(values: Any) -> dict[Any, Any]:
    """Returns the contents of a container, by position, key or field; nothing for other values."""
    if isinstance(values, _SEQUENCES):
        return dict(enumerate(values))
    if isinstance(values, dict):
        return dict(values)
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        names = (field.name for field in dataclasses.fields(values))
        return {name: getattr(values, name) for name in names if hasattr(values, name)}
    return {}
