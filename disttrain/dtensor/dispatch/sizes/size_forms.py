"""Arguments that are sizes, as parts of forms: alike for a call with other lengths that is planned in the same way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from disttrain.dtensor._torch import OpOverload, handle_of
from disttrain.dtensor.rules.reshape import groups_of
from disttrain.dtensor.spec.layout import Spec

Key = tuple[Any, ...]

_INTS: Final = frozenset({int})


def sized(leader: Spec, key: Key) -> Key | None:
    """`key` with less in place of sizes and of numbers; None where a call with other sizes may be planned otherwise."""
    shortened = _SHORTENED.get(key[0])
    return key if shortened is None else shortened(leader, key)


def _view(leader: Spec, key: Key) -> Key | None:
    """The dims that are regrouped, where each dim that is cut is the first of its group, and of several elements.

    The same cut of the group's first new dim then is the same cut of the group, as long as it is even.
    """
    shape = resolved(leader.shape, key[1]) if len(key) == 2 and type(key[1]) is tuple else None
    if shape is None:
        return None
    cuts = leader.layout.even_cuts
    if cuts is None:
        return None
    groups = groups_of(leader.shape, shape)
    for dim, num_pieces in cuts:
        old, new = next(group for group in groups if dim in group.old)
        if dim != old.start or not new or leader.shape[dim] == 1:
            return None
        if shape[new.start] == 1 or shape[new.start] % num_pieces:
            return None
    return (key[0], *[(old.stop, new.stop) for old, new in groups], *[size == 1 for size in shape])


def resolved(shape: Sequence[int], size: Sequence[Any]) -> tuple[int, ...] | None:
    """The sizes of a view, the one that is left open among them; None where they are no sizes, or there are none."""
    if not _INTS.issuperset(map(type, size)):
        return None
    num_elements, num_given = math.prod(shape), math.prod(size)
    resolved = tuple(size)
    if num_given < 0:
        if resolved.count(-1) != 1:
            return None
        resolved = tuple([num_elements // -num_given if length == -1 else length for length in size])
        num_given = math.prod(resolved)
    return resolved if num_given == num_elements > 0 and min(resolved, default=1) > 0 else None


def _expand(leader: Spec, key: Key) -> Key | None:
    """The dims that stay as they are, and those that have one element afterwards."""
    if len(key) != 2 or type(key[1]) is not tuple or not all(type(length) is int for length in key[1]):
        return None
    offset = len(key[1]) - len(leader.shape)
    if offset < 0:
        return None
    old = (*[None] * offset, *leader.shape)
    return (key[0], *[(length in (-1, before), length == 1) for length, before in zip(key[1], old, strict=True)])


def _number(_: Spec, key: Key) -> Key:
    """No rule of these looks at a number that follows the operand."""
    return (key[0], int, *key[3:]) if len(key) > 2 and key[1] is int else key


_ATEN: Final = torch.ops.aten
REGROUPING: Final = frozenset({_ATEN.view.default, _ATEN._unsafe_view.default})
"""Operators that give an operand other sizes."""
EXPAND: Final[OpOverload] = _ATEN.expand.default

_SHORTENED: Final[dict[object, Callable[[Spec, Key], Key | None]]] = {
    **{handle_of(op): _view for op in REGROUPING},
    handle_of(EXPAND): _expand,
    **{
        handle_of(getattr(getattr(_ATEN, name), overload)): _number
        for name in ("add", "div", "mul", "sub")
        for overload in ("Scalar", "Tensor")
    },
}
