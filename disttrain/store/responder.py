"""A question to all members of a job, through the store: each has a thread that waits for it and answers.

Questions are numbered. Whoever asks sets the key of the next number, which wakes all responders; each sets a key of its
own with its answer. Between questions the threads sleep in the store.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence

from disttrain.errors import StoreError, StoreTimeoutError
from disttrain.store.base import Store
from disttrain.store.prefix import PrefixStore

_IDLE_S = 3600.0
_CLOSING_S = 2.0


class Responder:
    """Member `rank`: answers with what `answer` returns, over a connection of its own, until it is closed."""

    def __init__(self, store: Store, name: str, rank: int, answer: Callable[[], bytes]) -> None:
        self._store = PrefixStore(name, store).clone()
        self._rank = rank
        self._answer = answer
        self._number = 1
        self._thread = threading.Thread(target=self._answer_until_closed, name=f"disttrain {name}", daemon=True)
        self._thread.start()
        # A thread that an answer wakes while the interpreter is being taken down can take the process down with it.
        atexit.register(self.close)

    def ask(self, ranks: Sequence[int], timeout_s: float) -> dict[int, bytes]:
        """The answers of those of `ranks` that gave one in time; none when the store is gone."""
        number = self._number
        keys = {rank: f"{number}/{rank}" for rank in ranks}
        try:
            self._store.set(f"{number}", b"")
            try:
                self._store.wait(list(keys.values()), timeout_s)
            except StoreTimeoutError:
                keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
            return dict(zip(keys, self._store.multi_get(list(keys.values())), strict=True))
        except StoreError:
            return {}

    def close(self) -> None:
        """End the thread. Idempotent."""
        atexit.unregister(self.close)
        self._store.close()
        self._thread.join(_CLOSING_S)

    def _answer_until_closed(self) -> None:
        while True:
            try:
                self._store.wait([f"{self._number}"], _IDLE_S)
                number, self._number = self._number, self._number + 1
                self._store.set(f"{number}/{self._rank}", self._answer())
            except StoreTimeoutError:
                continue
            except StoreError:
                return
