"""Finds out for all who wait which of them have not come: one asks the store, in one request, and the others read it.

Without that, each of N ranks would ask for each of the others when a timeout ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from disttrain.errors import StoreTimeoutError
from disttrain.store.base import Store

_PATIENCE_S: Final = 5.0
"""The time after which one who was to find out is taken for dead, and the next one does."""
_MOST_TRIES: Final = 3


def once(store: Store, key: str, compute: Callable[[], str], patience_s: float = _PATIENCE_S) -> str:
    """The value of `key`: what `compute` returns on the first that comes, for all; whatever is there already wins.

    Where that one does not come to an end within `patience_s`, another does it. Raises StoreError.
    """
    for attempt in range(_MOST_TRIES):
        if store.add(f"{key}/tries/{attempt}", 1) == 1:
            break
        try:
            store.wait([key], patience_s)
            return store.get(key).decode()
        except StoreTimeoutError:
            continue
    return store.compare_set(key, "", compute()).decode()


def absent(store: Store, prefix: str, ranks: Sequence[int]) -> list[int]:
    """Those of `ranks` that have no key `prefix` + rank."""
    try:
        present = set(store.list_keys(prefix))
    except NotImplementedError:  # a program's own store
        return [rank for rank in ranks if not store.check([f"{prefix}{rank}"])]
    return [rank for rank in ranks if f"{prefix}{rank}" not in present]
