"""Locks on files that end with the process that took them, however it ends. Torch-free.

A lock gets its name only once it is held, so a lock that is found free belongs to a dead owner. A lock belongs to the
open file, which a fork shares. So forks close theirs; otherwise a child that outlives its parent would keep the lock.
Looking at a lock takes a shared lock for a moment, so that nobody who looks is taken for an owner. Source: flock(2).
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNNAMED = ".new"
"""Before the last suffix of a lock that is not held yet."""


class _OpenFiles:
    """The open lock files of this process."""

    def __init__(self) -> None:
        # A finalizer or a signal handler may close a lock while its thread is in this code.
        self._mutex = threading.RLock()
        self._descriptors: set[int] = set()
        os.register_at_fork(
            before=self._mutex.acquire, after_in_parent=self._mutex.release, after_in_child=self._let_go
        )

    def open(self, path: Path) -> int:
        with self._mutex:  # a fork between these two lines would not know the lock
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            self._descriptors.add(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        with self._mutex:
            self._descriptors.discard(descriptor)
            os.close(descriptor)

    def _let_go(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._mutex.release()


_OPEN = _OpenFiles()


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the lock `path`, which nobody else asks for, within the block. Where there are no locks the file marks only.

    Raises OSError.
    """
    pid = os.getpid()
    descriptor = _locked(path)
    try:
        yield
    finally:
        if os.getpid() == pid:  # a fork that ends holds nothing
            try:
                path.unlink(missing_ok=True)
            finally:
                _OPEN.close(descriptor)


def is_locked(path: Path) -> bool | None:
    """True if a living process holds the lock; None where nobody can know, since there are no locks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def remove_unheld(path: Path) -> None:
    """Remove what a process has left that died while it took this lock; one that lives begins again. Raises OSError."""
    unnamed = _unnamed(path)
    if is_locked(unnamed) is False:
        unnamed.unlink(missing_ok=True)


def _unnamed(path: Path) -> Path:
    return path.with_suffix(UNNAMED + path.suffix)


def _locked(path: Path) -> int:
    unnamed = _unnamed(path)
    while True:
        descriptor = _OPEN.open(unnamed)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # no locks here
            pass
        try:
            os.replace(unnamed, path)
        except OSError as error:
            _OPEN.close(descriptor)
            # Another process saw it before it was held, took its owner for dead, and removed it.
            if not isinstance(error, FileNotFoundError):
                raise
        else:
            return descriptor
