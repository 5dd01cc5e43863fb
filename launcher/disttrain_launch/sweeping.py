"""What workers of earlier rounds left in the store is removed, so that a job may have any number of rounds."""

from __future__ import annotations

import threading
from collections.abc import Callable

from disttrain.errors import DisttrainError
from disttrain.store.base import Store

KEPT_ROUNDS = 2
"""The one that runs, and the last: a node that was given up may still have workers of it, and they wait for keys."""


class Sweeper:
    """Removes keys in a thread of its own: there is one for some of each rank's, and nobody shall wait for that.

    Args: open_store  a connection to the store that workers use, closed here after each sweep.
    """

    def __init__(self, open_store: Callable[[], Store]) -> None:
        self._open_store = open_store

    def begun(self, round: int) -> None:
        """Return at once."""
        if round >= KEPT_ROUNDS:
            threading.Thread(target=self._sweep, args=(round - KEPT_ROUNDS,), name="sweeper", daemon=True).start()

    def _sweep(self, round: int) -> None:
        try:
            store = self._open_store()
            try:
                # Each world of the round has its keys below this: `init_process_group` sees to it.
                for key in store.list_keys(f"round-{round}/"):
                    store.delete_key(key)
            finally:
                store.close()
        except DisttrainError:
            return  # The store is gone, or slow: keys that stay do no harm.
