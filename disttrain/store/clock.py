"""Measures the offset of this rank's clock from rank 0's, by requests through the store: the best of several.

As in Cristian's algorithm (1989): a reply that took the time d was sent d/2 ago, give or take d/2.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Final

from disttrain.errors import StoreError, StoreTimeoutError
from disttrain.store import Store

NUM_QUESTIONS: Final = 5
ANSWER_S: Final = 5.0
_QUEUE: Final = "clock"
_IDLE_S: Final = 3600.0


def serve_clock(store: Store, clock: Callable[[], float] = time.time) -> None:
    """Tell the time to whoever asks, until `store` is closed."""
    while True:
        try:
            question = store.queue_pop(_QUEUE, timeout=_IDLE_S).decode()
            store.set(question, repr(clock()))
        except StoreTimeoutError:
            continue
        except StoreError:
            return


def ask_clock(store: Store, clock: Callable[[], float] = time.time) -> tuple[float, float] | None:
    """Seconds to add to this clock for that which is served, and the error's bound; None when nobody answers."""
    best: tuple[float, float] | None = None
    key = f"clock/{uuid.uuid4().hex}"
    try:
        for number in range(NUM_QUESTIONS):
            asked_s = clock()
            store.queue_push(_QUEUE, f"{key}/{number}")
            store.wait([f"{key}/{number}"], ANSWER_S)
            answered_s = clock()
            told_s = float(store.get(f"{key}/{number}"))
            store.delete_key(f"{key}/{number}")
            error_s = (answered_s - asked_s) / 2
            if best is None or error_s < best[1]:
                best = told_s - (asked_s + answered_s) / 2, error_s
    except StoreError:
        pass  # What has been found by then is good.
    return best
