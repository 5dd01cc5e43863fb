"""Threads that the end of the interpreter waits for, although they are daemons.

At its end Python ends a daemon thread where it asks for the interpreter's lock. One that comes back from C++ is then
unwound through C++ frames, whose destructors drop Python objects without the lock: a process whose script has ended
well dies by SIGSEGV or SIGABRT.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import Final

_PATIENCE_S: Final = 10.0
"""More than C++ takes to notice that its transport has been aborted, on a busy machine."""


class AwaitedThreads:
    """Starts threads until the interpreter ends, and then waits for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._is_over = False
        atexit.register(self.close)
        # A child has none of its parent's threads, and perhaps a lock that one of them held.
        os.register_at_fork(after_in_child=self._forget)

    def start(self, target: Callable[[], object], name: str) -> threading.Thread | None:
        """Runs `target` in a thread; once the interpreter ends nothing happens, and there is no thread."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        with self._lock:
            if self._is_over:
                return None
            self._threads = [other for other in self._threads if other.is_alive()]
            self._threads.append(thread)
            thread.start()
        return thread

    def close(self, patience_s: float = _PATIENCE_S) -> None:
        """Start no more, and wait for those that run. Idempotent."""
        with self._lock:
            self._is_over = True
            threads, self._threads = self._threads, []
        end_s = time.monotonic() + patience_s
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._threads = []
        self._is_over = False


AWAITED: Final = AwaitedThreads()
