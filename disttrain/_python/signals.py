"""Signals that schedulers and terminals send to all processes of a job, and helper processes that must outlive them.

A store's server, or a process that writes saves, is needed until the workers have ended; it ends by itself then.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

TO_ALL: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def blocked_for_a_helper() -> Iterator[None]:
    """Around the start of a helper, which inherits the mask: no signal ends it before it has called `ignore_all`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TO_ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_all() -> None:
    """In a helper: ignore these signals from now on, those too that have come since it was started."""
    for number in TO_ALL:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TO_ALL)
