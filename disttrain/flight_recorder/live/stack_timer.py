"""faulthandler's timer, which writes all stacks unless it is set anew in time; it is stopped while the process forks.

Its thread is C, and waits in a lock that a child inherits without the thread. The child's interpreter would wait at its
end for that thread for ever.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from typing import Any, Final


class _StackTimer:
    """faulthandler has one for the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set: tuple[float, Any] | None = None
        os.register_at_fork(before=self._stop, after_in_parent=self._go_on, after_in_child=self._forget)

    def set(self, timeout_s: float, file: Any) -> None:
        """Have all stacks written to `file`, if nobody calls this again or `cancel` before then."""
        with self._lock:
            self._set = timeout_s, file
            faulthandler.dump_traceback_later(timeout_s, file=file)

    def cancel(self) -> None:
        """Have them not written any more."""
        with self._lock:
            self._set = None
            faulthandler.cancel_dump_traceback_later()

    def _stop(self) -> None:
        self._lock.acquire()
        if self._set is not None:
            faulthandler.cancel_dump_traceback_later()

    def _go_on(self) -> None:
        if self._set is not None:
            timeout_s, file = self._set
            faulthandler.dump_traceback_later(timeout_s, file=file)
        self._lock.release()

    def _forget(self) -> None:
        self._set = None
        self._lock.release()


STACK_TIMER: Final = _StackTimer()
