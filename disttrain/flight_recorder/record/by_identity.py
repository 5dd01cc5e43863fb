"""A function of values that are large and shared: computed once for each object, which is not hashed or compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

V = TypeVar("V")
R = TypeVar("R")


class ByIdentity(Generic[V, R]):
    """Calls `function` once for each object. A world's ranks are as many as there are dumps, so to hash them for each
    dump would take quadratic time."""

    def __init__(self, function: Callable[[V], R]) -> None:
        self._function = function
        # With the value itself, so that no other object gets its address.
        self._results: dict[int, tuple[V, R]] = {}

    def __call__(self, value: V) -> R:
        entry = self._results.get(id(value))
        if entry is None:
            entry = self._results[id(value)] = (value, self._function(value))
        return entry[1]
