"""Keeps a failure in Gloo's own threads from ending the process before anybody has heard of it.

Gloo throws in its loop's thread where a message is larger than what waits for it, since ranks called different things.
Nobody catches that, so that C++ ends the process by SIGABRT. Here it asks first, by `std::set_terminate`: a thread that
Gloo has failed in stays where it is for good, if somebody waits in Python who can raise an error instead. All other
failures go to the handler that was there before, and so does one that nobody acknowledges.

The thread holds locks of its transport then, which is not to be shut down, nor destroyed, any more.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from typing import Any, Final

_GRACE_S: Final = 2.0
"""The time that a rank may take to acknowledge a failure."""
_NAME_AT: Final = ctypes.sizeof(ctypes.c_void_p)
"""The offset of a type's name in its std::type_info, behind the pointer to the table of virtual functions."""
_Handler: Final = ctypes.CFUNCTYPE(None)


class GlooFailures:
    """The failures in Gloo's threads of this process."""

    def __init__(self) -> None:
        self.num_failures = 0
        self._num_settled = 0
        self._acknowledged = threading.Event()
        self._handler: Any = None
        self._previous: Any = None
        self._current_type: Any = None
        self._libc: Any = None
        self._lock = threading.Lock()

    def watch(self) -> None:
        """From now on, ask before a failure ends the process, where C++ has the library for it. Idempotent."""
        with self._lock:
            if self._handler is not None:
                return
            try:
                cpp = ctypes.CDLL("libstdc++.so.6")
                set_terminate = cpp["_ZSt13set_terminatePFvvE"]
                self._current_type = cpp["__cxa_current_exception_type"]
            except (OSError, AttributeError):
                return
            self._libc = ctypes.CDLL(None)
            set_terminate.restype, set_terminate.argtypes = ctypes.c_void_p, [_Handler]
            self._current_type.restype, self._current_type.argtypes = ctypes.c_void_p, []
            self._handler = _Handler(self._on_terminate)
            self._previous = _Handler(set_terminate(self._handler))

    @property
    def is_unsettled(self) -> bool:
        """True while a failure has led to no error yet."""
        return self.num_failures > self._num_settled

    def acknowledge(self) -> None:
        """The process need not end: somebody raises an error for all that there are, and calls `settle` then."""
        if self.num_failures:
            self._acknowledged.set()

    def settle(self) -> None:
        """All that there are have led to an error."""
        self._num_settled = self.num_failures

    def _on_terminate(self) -> None:
        if b"gloo" in self._exception_type():
            self._acknowledged.clear()
            self.num_failures += 1
            if self._acknowledged.wait(_GRACE_S):
                # Not in Python: a thread that wakes there while the interpreter is taken down ends the process.
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                while True:
                    self._libc.pause()
        self._previous()

    def _exception_type(self) -> bytes:
        info = self._current_type()
        if not info:
            return b""
        return ctypes.cast(ctypes.c_void_p.from_address(info + _NAME_AT).value or 0, ctypes.c_char_p).value or b""


GLOO_FAILURES: Final = GlooFailures()
