"""Removes what workers of earlier rounds left in the store, so that a job may have any number of rounds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from disttrain.errors import DisttrainError
from disttrain.store.base import Store

KEPT_ROUNDS = 2
"""The one that runs, and the last: a node that was given up may still have workers of it, and they wait for keys."""


class Sweeper:
    """Removes keys in a thread of its own: there is one for some of each rank's, and nobody shall wait for that.

    Args: reach  gives the store that workers use, for each sweep.
    """

    def __init__(self, reach: Callable[[], AbstractContextManager[Store]]) -> None:
        self._reach = reach

    def begun(self, round: int) -> None:
        """Return at once."""
        if round >= KEPT_ROUNDS:
            threading.Thread(target=self._sweep, args=(round - KEPT_ROUNDS,), name="sweeper", daemon=True).start()

    def _sweep(self, round: int) -> None:
        try:
            with self._reach() as store:
                # Each world of the round has its keys below this: `init_process_group` sees to it.
                for key in store.list_keys(f"round-{round}/"):
                    store.delete_key(key)
        except DisttrainError:
            return  # The store is gone, or slow: keys that stay do no harm.
