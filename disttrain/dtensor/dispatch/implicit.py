"""implicit_replication: what happens to plain tensors beside DTensors, and to operators without a rule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from weakref import WeakKeyDictionary

from disttrain.process_group import World, current_world

# Kept for each world, not each thread: a backward pass runs in other threads, and meets the same plain tensors.
_MODES: Final[WeakKeyDictionary[World, bool]] = WeakKeyDictionary()
_COMPOSING: Final[WeakKeyDictionary[World, bool]] = WeakKeyDictionary()


@contextmanager
def implicit_replication(enabled: bool = True) -> Iterator[None]:
    """Within it, plain tensors beside DTensors are taken as replicated: every rank must hold the same values.

    With `enabled=False` nothing is replicated unless asked for: an operator without a sharding rule raises LayoutError
    instead of gathering its operands. Outside of both, plain tensors are refused; gathering warns.
    """
    world = current_world("implicit_replication")
    before = _MODES.get(world)
    _MODES[world] = enabled
    try:
        yield
    finally:
        if before is None:
            del _MODES[world]
        else:
            _MODES[world] = before


@contextmanager
def composing(world: World) -> Iterator[None]:
    """Within it torch composes an operator, of DTensors alone; plain tensors are those that it makes on the way."""
    before = _COMPOSING.get(world, False)
    _COMPOSING[world] = True
    try:
        yield
    finally:
        _COMPOSING[world] = before


def replicates_plain(world: World) -> bool:
    """True within `implicit_replication()`, and while torch composes an operator."""
    return _MODES.get(world) is True or _COMPOSING.get(world, False)


def may_gather(world: World) -> bool:
    """False within `implicit_replication(False)`."""
    return _MODES.get(world) is not False
