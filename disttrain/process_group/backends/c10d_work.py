"""Handles around those of torch's transports: with a last step on the host, or to be given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from disttrain.process_group.backends.base import GivableUp
from disttrain.process_group.work import TransportWork


class FinishingWork:
    """An operation with a last step, which runs once, when somebody has waited for the transport."""

    __slots__ = ("_finish", "_lock", "_started")

    def __init__(self, started: TransportWork, finish: Callable[[], None]) -> None:
        self._started = started
        self._finish: Callable[[], None] | None = finish
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is None:
            self._started.wait()
        else:
            self._started.wait(timeout)
        self._finish_once()
        return True

    def is_completed(self) -> bool:
        return self._started.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        def finished(started: torch.futures.Future[Any]) -> None:
            started.value()
            self._finish_once()

        return self._started.get_future().then(finished)

    def _finish_once(self) -> None:
        # Callbacks of the future run in a thread of the transport.
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()


class InterruptibleWork:
    """A collective of a transport that cannot end one that is under way: the host's wait can still end.

    torch offers nothing that wakes a waiting thread, so the wait is cut in slices.
    """

    __slots__ = ("_scope", "_started")
    SLICE = timedelta(seconds=0.5)

    def __init__(self, started: TransportWork, scope: GivableUp) -> None:
        self._started = started
        self._scope = scope

    def wait(self, timeout: timedelta | None = None) -> bool:
        started = self._started
        if timeout is not None and timeout <= self.SLICE:
            return started.wait(timeout)
        deadline_s = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while True:
            try:
                return started.wait(self.SLICE)
            except RuntimeError:
                if started.is_completed():
                    # It failed, or ended just after the slice.
                    return started.wait()
                self._scope.check()
                if deadline_s is not None and time.monotonic() >= deadline_s:
                    raise

    def is_completed(self) -> bool:
        return self._started.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._started.get_future()
