"""A file system that fails at one of its writes, fsyncs, renames or mkdirs, or ends the process there.

Torch-free: the processes that write asynchronous saves make one too.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from disttrain.checkpoint.storage.base import LocalStorage

CALLS = ("pwrite", "fsync", "rename", "mkdir")
NEVER = 1 << 30
PAGE = 4096


class FaultyStorage(LocalStorage):
    """Lets its process's file operation number `fails_at`, of those in CALLS, go wrong in one of these ways:

    "ENOSPC", "EIO" and so on: the call fails, and all that follow; "short": each write takes a third of its bytes, and
    none fails; "kill": SIGKILL instead of the call.
    """

    def __init__(self, fails_at: int, how: str) -> None:
        self.fails_at, self.how = fails_at, how
        self.num_calls = 0
        self._mutex = threading.Lock()
        self._real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in CALLS}
        for name in CALLS:
            setattr(os, name, self._wrapped(name))

    def undo(self) -> None:
        """Give the process its own calls back."""
        for name, call in self._real.items():
            setattr(os, name, call)

    def recipe(self) -> tuple[str, dict[str, Any]]:
        return "tests.multirank.faulty_storage:FaultyStorage", {"fails_at": self.fails_at, "how": self.how}

    def _wrapped(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._mutex:
                number = self.num_calls
                self.num_calls += 1
            if name == "pwrite" and self.how == "short":
                num_bytes = len(args[1])
                # Direct I/O goes by whole pages, short or not.
                some = num_bytes // 3 // PAGE * PAGE if num_bytes % PAGE == 0 else num_bytes // 3
                return self._real[name](args[0], args[1][: some or num_bytes], args[2])
            if number >= self.fails_at and self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if number >= self.fails_at and self.how != "short":
                code = getattr(errno, self.how)
                raise OSError(code, os.strerror(code))
            return self._real[name](*args, **kwargs)

        return call
