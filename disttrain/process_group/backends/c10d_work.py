"""Handles around those of torch's transports: with a last step on the host, or to be given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch

from disttrain.process_group._c10d import Transport, keep_for_good
from disttrain.process_group.backends.base import GivableUp
from disttrain.process_group.backends.gloo_failures import GLOO_FAILURES
from disttrain.process_group.work import TransportWork

Finish = Callable[[], Sequence[torch.Tensor]]
"""A last step; returns the tensors that it wrote to."""


_UNKNOWN_AFTER_S: Final = 0.4
"""The time that ranks may take after a failure to find out which of their calls do not fit."""
_INSTANT: Final = timedelta(milliseconds=1)
"""torch takes a timeout of nothing for none at all."""
_TOO_LARGE: Final = "a message came that is larger than what this rank waits for"


class FinishingWork:
    """An operation with a last step, which runs once, when somebody has waited for the transport."""

    __slots__ = ("_finish", "_future", "_is_finished", "_lock", "_started")

    def __init__(self, started: TransportWork, finish: Finish) -> None:
        self._started = started
        self._finish = finish
        self._is_finished = False
        self._future: torch.futures.Future[Sequence[torch.Tensor]] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is None:
            self._started.wait()
        else:
            self._started.wait(timeout)
        with self._lock:
            future = self._future
            if future is None and not self._is_finished:
                self._finish_unseen()
                self._is_finished = True
        if future is not None:
            # The last step runs in the future's callback, on a stream of its own.
            future.wait()
        return True

    def is_completed(self) -> bool:
        return self._started.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._is_finished:
                return self._started.get_future()
            if self._future is None:
                self._future = self._started.get_future().then(self._finished)
            return self._future

    def _finished(self, started: torch.futures.Future[Any]) -> Sequence[torch.Tensor]:
        started.value()
        # Who waits for a CUDA future is ordered after the streams of the tensors that it holds.
        return self._finish_unseen()

    def _finish_unseen(self) -> Sequence[torch.Tensor]:
        # Autograd does not see what collectives write, whether a transport does it or a last step.
        with torch.no_grad():
            return self._finish()


class InterruptibleWork:
    """A collective of a transport that cannot end one that is under way: the host's wait can still end.

    torch offers nothing that wakes a waiting thread, so the wait is cut in slices.
    """

    __slots__ = ("_has_ended", "_scope", "_started", "_transport")
    MOMENT = timedelta(seconds=0.3)
    SLICE = timedelta(seconds=0.5)

    def __init__(self, started: TransportWork, scope: GivableUp, transport: Transport) -> None:
        self._started = started
        self._scope = scope
        self._transport = transport
        self._has_ended = False

    def __del__(self) -> None:
        if not self._has_ended and not self._started.is_completed():
            if self._scope.is_given_up:
                keep_for_good(self._transport)
            else:
                self._scope.dropped = [work for work in self._scope.dropped if not work.is_completed()]
                self._scope.dropped.append(self._started)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None and timeout <= self.MOMENT:
            self._has_ended = self._started.wait(timeout)
            return self._has_ended
        deadline_s = None if timeout is None else time.monotonic() + timeout.total_seconds()
        # Most end here: what only some need is asked for afterwards. Not while the error is handled: the end of a slice
        # is no cause of what is raised later.
        try:
            self._has_ended = self._started.wait(self.MOMENT)
        except RuntimeError:
            pass
        else:
            return self._has_ended
        self._has_ended = self._waited_on(deadline_s)
        return self._has_ended

    def _waited_on(self, deadline_s: float | None) -> bool:
        """Wait, after a moment in which it has not ended."""
        if self._started.is_completed():
            # It failed, or ended just after the slice.
            return self._started.wait()
        try:
            return self._wait_long(deadline_s)
        finally:
            self._scope.looked()

    def _wait_long(self, deadline_s: float | None) -> bool:
        started, began_s = self._started, time.monotonic()
        while True:
            self._look(began_s)
            try:
                return started.wait(self.SLICE)
            except RuntimeError:
                pass
            if started.is_completed():
                return started.wait()
            if self._scope.is_given_up:
                # Its destructor would wait for what is still under way, in whichever thread forgets it last.
                keep_for_good(self._transport)
            self._scope.check()
            if deadline_s is not None and time.monotonic() >= deadline_s:
                return started.wait(_INSTANT)  # It raises.

    def _look(self, began_s: float) -> None:
        """Find out whether to wait is in vain. Raises InterruptedError where somebody knows that, and why."""
        if GLOO_FAILURES.is_unsettled:
            GLOO_FAILURES.acknowledge()
            self._scope.look("" if time.monotonic() - began_s < _UNKNOWN_AFTER_S else _TOO_LARGE)
            if self._scope.is_given_up:
                GLOO_FAILURES.settle()
                keep_for_good(self._transport)
                self._scope.check()
        else:
            self._scope.look("")

    def is_completed(self) -> bool:
        return self._started.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._started.get_future()


def num_under_way(works: Sequence[TransportWork], wait_s: float) -> int:
    """Counts those of `works` that have not ended, well or not, after `wait_s` seconds."""
    deadline_s = time.monotonic() + wait_s
    return sum(not _ends(work, deadline_s) for work in works)


def _ends(work: TransportWork, deadline_s: float) -> bool:
    """True when `work` ends by then. Gloo's works on nothing at all can be waited for, and never report their end."""
    if work.is_completed():
        return True
    try:
        return work.wait(max(timedelta(seconds=deadline_s - time.monotonic()), _INSTANT))
    except RuntimeError:
        return work.is_completed()
