"""The end of the main thread: the script's, after which Python waits for all other threads that are no daemons.

`atexit` comes only when those have ended. What is called here comes first, from a list that Python itself keeps for its
thread pools.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress


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
