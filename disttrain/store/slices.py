"""Waiting in the store for other ranks, in slices, so that it can end when it has become pointless."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from disttrain.errors import StoreTimeoutError

_FIRST_S: Final = 0.05
SLICE_S: Final = 0.5

Waited = TypeVar("Waited")


def in_slices(
    keys: Sequence[str],
    wait: Callable[[float], Waited],
    timeout_s: float,
    check: Callable[[], object],
    longest_s: float = SLICE_S,
) -> Waited:
    """Waits for `keys` in slices, and returns the result of `wait(slice_s)`; `check` may raise between slices.

    The first is short, and each later one twice as long as the one before, up to `longest_s`. Raises StoreTimeoutError
    after `timeout_s`.
    """
    rest_s, deadline_s = timeout_s, time.monotonic() + timeout_s
    slice_s, next_s = _FIRST_S, SLICE_S
    while True:
        try:
            return wait(min(slice_s, rest_s))
        except StoreTimeoutError:
            slice_s, next_s = next_s, min(2 * next_s, longest_s)
            check()
            rest_s = deadline_s - time.monotonic()
            if rest_s <= 0:
                names = ", ".join(map(repr, keys[:3]))
                raise StoreTimeoutError("wait", f"{names} did not come within {timeout_s:g} s.") from None
