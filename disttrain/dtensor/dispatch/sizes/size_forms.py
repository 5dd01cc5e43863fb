"""Arguments that are sizes, as parts of forms: alike for a call with other lengths that is planned in the same way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul
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
    """Where the cuts are afterwards, if each dim that is cut is the first of those that are regrouped with it, and of
    several elements.

    The same cut of the group's first new dim then is the same cut of the group, as long as it is even.
    """
    groups: dict[int, int]
    form: Any
    cuts, old = leader.layout.even_cuts, leader.shape
    if cuts is None or len(key) != 2 or type(key[1]) is not tuple or leader.is_symbolic:
        return None
    new = resolved(old, key[1])
    if new is None:
        return None
    if 1 in old or 1 in new:
        groups, form = _regrouping(old, new)
    elif len(cuts) == 1 and not cuts[0][0]:
        return None if new[0] % cuts[0][1] else (key[0], len(new), 0)
    else:
        groups, form = _beginnings(old, new), len(new)
    places = []
    for dim, num_pieces in cuts:
        new_dim = groups.get(dim)
        if new_dim is None or old[dim] == 1 or new[new_dim] == 1 or new[new_dim] % num_pieces:
            return None
        places.append(new_dim)
    return key[0], form, *places


def _beginnings(old: Sequence[int], new: Sequence[int]) -> dict[int, int]:
    """The dims that are the first of their groups, with the first new dims, where no size is one: groups begin where as
    many elements have gone before."""
    places = {before: dim for dim, before in zip(range(len(new)), accumulate(new, mul, initial=1), strict=False)}
    numbers_before = zip(range(len(old)), accumulate(old, mul, initial=1), strict=False)
    return {dim: places[before] for dim, before in numbers_before if before in places}


@lru_cache(4096)
def _regrouping(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[dict[int, int], tuple[Any, ...]]:
    """The dims that are the first of their groups, with the first new dims; the dims that are regrouped, and which new
    ones have one element."""
    groups = groups_of(old, new)
    firsts = {before.start: after.start for before, after in groups if before and after}
    return firsts, (*[(before.stop, after.stop) for before, after in groups], *[length == 1 for length in new])


@lru_cache(4096)
def resolved(shape: tuple[int, ...], size: tuple[Any, ...]) -> tuple[int, ...] | None:
    """The sizes of a view, the one that is left open among them; None where they are no sizes, or there are none."""
    if not _INTS.issuperset(map(type, size)):
        return None
    num_elements, num_given = math.prod(shape), math.prod(size)
    if num_given < 0:
        if size.count(-1) != 1:
            return None
        place = size.index(-1)
        size = (*size[:place], num_elements // -num_given, *size[place + 1 :])
        num_given = math.prod(size)
    return size if num_given == num_elements > 0 and min(size, default=1) > 0 else None


def _expand(leader: Spec, key: Key) -> Key | None:
    """The dims that stay as they are, and those that have one element afterwards."""
    if len(key) != 2 or type(key[1]) is not tuple or not all(type(length) is int for length in key[1]):
        return None
    offset = len(key[1]) - len(leader.shape)
    if offset < 0:
        return None
    old = (*[None] * offset, *leader.shape)
    return (key[0], *[(length in (-1, before), length == 1) for length, before in zip(key[1], old, strict=True)])


def _gradient(leader: Spec, key: Key) -> Key | None:
    """Of a gradient of places along a dim that is whole, where other dims that are cut are as large as the operand's.
    The sizes come first, then the dim."""
    sizes, cuts = key[1], leader.layout.even_cuts
    if type(sizes) is not tuple or not _INTS.issuperset(map(type, sizes)) or cuts is None or not sizes:
        return None
    dim = key[3] % len(sizes)
    is_dropped = len(leader.shape) < len(sizes)
    for cut_dim, _ in cuts:
        into = cut_dim + (is_dropped and cut_dim >= dim)
        if into == dim or sizes[into] != leader.shape[cut_dim]:
            return None
    return (key[0], *[size == 1 for size in sizes], *key[2:]) if min(sizes) > 0 else None


def _number(_: Spec, key: Key) -> Key:
    """No rule of these looks at a number that follows the operand."""
    return (key[0], int, *key[3:]) if len(key) > 2 and key[1] is int else key


def _groups(_: Spec, key: Key) -> Key:
    """Numbers of channels and of groups: sizes of batch and image, which stand with them before the last argument, are
    the operand's."""
    return (*key[:-9], key[-6], *key[-2:]) if key[-9:-1:2] == (int,) * 4 else key


_ATEN: Final = torch.ops.aten
REGROUPING: Final = frozenset({_ATEN.view.default, _ATEN._unsafe_view.default})
"""Operators that give an operand other sizes."""
EXPAND: Final[OpOverload] = _ATEN.expand.default

GRADIENTS: Final = frozenset({_ATEN.slice_backward.default, _ATEN.select_backward.default})
SIZED: Final = REGROUPING | GRADIENTS | {EXPAND}
"""Operators of one operand that are told the sizes of their result."""

_SHORTENED: Final[dict[object, Callable[[Spec, Key], Key | None]]] = {
    **{handle_of(op): _view for op in REGROUPING},
    **{handle_of(op): _gradient for op in GRADIENTS},
    handle_of(EXPAND): _expand,
    **{handle_of(op): _groups for op in (_ATEN.native_group_norm.default, _ATEN.native_group_norm_backward.default)},
    **{
        handle_of(getattr(getattr(_ATEN, name), overload)): _number
        for name in ("add", "div", "mul", "sub")
        for overload in ("Scalar", "Tensor")
    },
}
