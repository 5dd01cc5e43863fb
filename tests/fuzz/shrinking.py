"""Make a failing value small: try smaller ones, largest steps first, and keep what still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

Value = TypeVar("Value")
Item = TypeVar("Item")


def shrink(
    value: Value,
    still_fails: Callable[[Value], bool],
    smaller: Callable[[Value], Iterable[Value]],
    limit_s: float = 60.0,
) -> Value:
    """The smallest value that is found in `limit_s` seconds; nothing that `smaller` offers of it fails, if time was
    enough. None is tried twice: values that are printed alike are the same."""
    end = time.monotonic() + limit_s
    tried = {repr(value)}
    again = True
    while again:
        again = False
        for candidate in smaller(value):
            if time.monotonic() > end:
                return value
            if repr(candidate) in tried:
                continue
            tried.add(repr(candidate))
            if still_fails(candidate):
                value, again = candidate, True
                break
    return value


def without_some(items: Sequence[Item]) -> Iterator[tuple[Item, ...]]:
    """The items without a run of them: half of all, then shorter and shorter ones, each alone in the end (ddmin,
    Zeller and Hildebrandt 2002). Later items go first, since others depend on earlier ones."""
    size = max(len(items) // 2, 1)
    while items:
        for start in reversed(range(0, len(items), size)):
            yield (*items[:start], *items[start + size :])
        if size == 1:
            return
        size = (size + 1) // 2
