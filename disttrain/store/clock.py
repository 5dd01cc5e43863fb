"""Measures the offset of this rank's clock from rank 0's, by requests through the store: the best of several.

As in Cristian's algorithm (1989): a reply that took the time d was sent d/2 ago, give or take d/2.

Ranks of one machine have one clock, so that one of them asks for all; and those that ask do so one after the other,
since of many that ask rank 0 at once each would measure the others' waiting.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

from disttrain.errors import StoreError, StoreTimeoutError
from disttrain.store import Store
from disttrain.store.attendance import once

NUM_QUESTIONS: Final = 5
ANSWER_S: Final = 5.0
SPACING_S: Final = 0.001
"""Of the times at which ranks may ask: rank 0 answers the questions of one within that, nearly always."""

_QUEUE: Final = "clock"
_IDLE_S: Final = 3600.0
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_UNKNOWN: Final = "unknown"


def serve_clock(store: Store, clock: Callable[[], float] = time.time) -> None:
    """Tell the time to whoever asks, until `store` is closed."""
    while True:
        try:
            asker = store.queue_pop(_QUEUE, timeout=_IDLE_S).decode()
            store.queue_push(asker, repr(clock()))
        except StoreTimeoutError:
            continue
        except StoreError:
            return


def ask_clock(store: Store, clock: Callable[[], float] = time.time) -> tuple[float, float] | None:
    """Seconds to add to this clock for that which is served, and the error's bound; None when nobody answers."""
    best: tuple[float, float] | None = None
    answers = f"clock/{uuid.uuid4().hex}"
    try:
        for _ in range(NUM_QUESTIONS):
            asked_s = clock()
            store.queue_push(_QUEUE, answers)
            told_s = float(store.queue_pop(answers, timeout=ANSWER_S))
            answered_s = clock()
            error_s = (answered_s - asked_s) / 2
            if best is None or error_s < best[1]:
                best = told_s - (asked_s + answered_s) / 2, error_s
    except StoreError:
        pass  # What has been found by then is good.
    return best


def own_boot() -> str:
    """Names what has one clock: this machine, since it started; empty where that cannot be told."""
    return _BOOT.read_text(encoding="ascii").strip() if _BOOT.exists() else ""


class SharedClock:
    """The offset of a machine's clock, which one of its ranks asks for, and the others read.

    `look` is called from time to time, and asks when it is this rank's turn. Where nobody answers it is asked again,
    ever more rarely.
    """

    def __init__(self, store: Store, rank: int, boot: str, began_s: float) -> None:
        self._store = store
        self._rank = rank
        self._boot = boot
        self._num_vain = 0
        self._due_s = began_s + rank * SPACING_S

    def look(self, now_s: float) -> tuple[float, float] | None:
        """The result of `ask_clock`; None where it is not due, has been returned already, or nobody knows it yet."""
        if now_s < self._due_s:
            return None
        name = f"clock of {self._boot or self._rank}/{self._num_vain}"
        self._num_vain += 1
        self._due_s = now_s + ANSWER_S * (1 << min(self._num_vain, 10))
        try:
            answer = once(self._store, name, self._asked, 1.2 * ANSWER_S)
        except StoreError:
            return None
        if answer == _UNKNOWN:
            return None
        self._due_s = float("inf")
        offset_s, error_s = map(float, answer.split())
        return offset_s, error_s

    def _asked(self) -> str:
        answer = ask_clock(self._store)
        return _UNKNOWN if answer is None else f"{answer[0]!r} {answer[1]!r}"
