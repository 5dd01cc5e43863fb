"""The end of the main thread: the script's, after which Python waits for all other threads that are no daemons.

`atexit` comes only when those have ended. What is called here comes first, from a list that Python itself keeps for its
thread pools.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

KeptBy = Callable[[BaseException | None, list[threading.Thread]], None]


class MainEnd:
    """Waits in a thread for the end of the script, and calls `callback` if other threads keep the process then: with
    the exception that ended the script, or None, and these threads.

    Args: grace_s  the time that threads may take to see that the script has ended.
    """

    def __init__(self, callback: KeptBy, grace_s: float) -> None:
        self._callback, self._grace_s = callback, grace_s
        self._pid = os.getpid()
        self._error: BaseException | None = None
        self._is_closed = False
        self._wake = threading.Event()
        # By the time of the end none can be started.
        threading.Thread(target=self._watch, name="disttrain script end", daemon=True).start()
        when_main_ends(self._note)

    def close(self) -> None:
        """Waits no longer. Idempotent."""
        self._is_closed = True
        self._wake.set()

    def _note(self, error: BaseException | None) -> None:
        # Where nothing keeps the process, it is about to end: no thread is to wake while the interpreter goes.
        if os.getpid() == self._pid and kept_by():
            self._error = error
            self._wake.set()

    def _watch(self) -> None:
        self._wake.wait()
        end_s = time.monotonic() + self._grace_s
        for thread in () if self._is_closed else kept_by():
            thread.join(max(0.0, end_s - time.monotonic()))
        if not self._is_closed and (threads := kept_by()):
            self._callback(self._error, threads)


def when_main_ends(callback: Callable[[BaseException | None], None]) -> None:
    """Call `callback`, in the main thread, when the script has ended, with the exception that ended it, if one did.

    `SystemExit` is none. Nothing is called where the script has ended already.
    """
    before = _printed()

    def ended() -> None:
        error = _printed()
        callback(None if error is before else error)

    with suppress(RuntimeError):
        threading._register_atexit(ended)  # type: ignore[attr-defined]


def kept_by() -> list[threading.Thread]:
    """The threads that keep this process, now that its script has ended."""
    return [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]


def _printed() -> BaseException | None:
    """The last exception that nobody has caught, which Python keeps whatever hook prints it."""
    return getattr(sys, "last_value", None)
