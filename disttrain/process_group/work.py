"""The handle of a collective that is under way."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

from disttrain.durations import Duration, seconds
from disttrain.errors import DisttrainError
from disttrain.process_group.observer import Call


class TransportWork(Protocol):
    """What a backend hands back: torch's `c10d::Work`, or an object with its methods."""

    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...


class Work:
    """One collective that was called with `async_op=True`.

    On CPU `wait` returns when the result is there. On CUDA it orders the current stream after the collective and
    returns at once, so that the host runs ahead.
    """

    __slots__ = ("_call", "_error", "_transport_work")

    def __init__(self, call: Call, transport_work: TransportWork) -> None:
        self._call = call
        self._transport_work = transport_work
        self._error: DisttrainError | None = None

    def wait(self, timeout: Duration | None = None) -> bool:
        """Wait for the result; True once it is there.

        Raises: CollectiveTimeoutError after `timeout` (default: the group's), BackendError when the transport failed.
        """
        call = self._call
        try:
            if timeout is None:
                self._transport_work.wait()
            else:
                self._transport_work.wait(timedelta(seconds=seconds("wait", timeout)))
        except Exception as error:
            self._error = call.failure(error)
            call.completed(self._error)
            raise self._error from error
        call.completed(None)
        return True

    def is_completed(self) -> bool:
        """True when the collective has ended, well or not; never waits."""
        return self._transport_work.is_completed()

    def exception(self) -> DisttrainError | None:
        """The error the collective ended with, if any; None while it is under way."""
        if self._error is None and self.is_completed():
            try:
                self.wait()
            except DisttrainError as error:
                return error
        return self._error
