"""The shapes and dtypes that a call asks for, in few values: they are hashed and compared at each call."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final

import torch

_shape_of: Final = attrgetter("shape")
_dtype_of: Final = attrgetter("dtype")


def several(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> tuple[Any, Any, Any]:
    """Shapes and dtypes of what is given, and the shapes of what comes of it."""
    if inputs:
        return _in_short([*map(_shape_of, inputs)]), _in_short([*map(_dtype_of, inputs)]), shapes_of(outputs)
    return _in_short([*map(_shape_of, outputs)]), _in_short([*map(_dtype_of, outputs)]), None


def shapes_of(tensors: Sequence[torch.Tensor]) -> Any:
    """The shape of one tensor, or those of several, in short."""
    if len(tensors) == 1:
        return tensors[0].shape
    return _in_short([*map(_shape_of, tensors)])


def _in_short(values: list[Any]) -> tuple[Any, ...]:
    """The same of all and how many, or all of them: one that is alike takes less to hash and compare than many."""
    if not values:
        return ()
    return (values[0], len(values)) if values.count(values[0]) == len(values) else tuple(values)
