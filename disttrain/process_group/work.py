"""The handle of a collective that is under way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch

from disttrain.errors import DisttrainError
from disttrain.process_group.watching.observer import Call, Recorder
from disttrain.store.durations import Duration, seconds

if TYPE_CHECKING:
    from disttrain.process_group.interfaces import GroupLike

CallArguments = tuple[str, "GroupLike", int, Sequence[torch.Tensor], Sequence[torch.Tensor], int | None]
"""The first arguments of a Call: operation, group, sequence, inputs, outputs, peer_rank."""


class TransportWork(Protocol):
    """The handle that a backend returns: torch's `c10d::Work`, or an object with its methods."""

    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...

    def get_future(self) -> torch.futures.Future[Any]: ...


class JoinedWork:
    """Several operations that are one to the caller."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[TransportWork]) -> None:
        self._parts = parts

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is None:
            for part in self._parts:
                part.wait()
            return True
        deadline_s = time.monotonic() + timeout.total_seconds()
        for part in self._parts:
            # torch takes a timeout of nothing for none at all.
            part.wait(timedelta(seconds=max(deadline_s - time.monotonic(), 1e-3)))
        return True

    def is_completed(self) -> bool:
        return all(part.is_completed() for part in self._parts)

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.collect_all([part.get_future() for part in self._parts])


class Work:
    """One collective that was called with `async_op=True`.

    On CPU `wait` returns when the result is there. On CUDA it orders the current stream after the collective and
    returns at once, so that the host runs ahead.
    """

    __slots__ = ("_call", "_call_arguments", "_error", "_record", "_recorder", "_started")

    # The door sets these itself: to be called with arguments takes a class half as long again, at each message.
    _started: TransportWork
    _call_arguments: CallArguments
    _call: Call | None
    _recorder: Recorder | None
    """Has made `_record` of it; None when nobody records, or all is told."""
    _record: Any
    _error: DisttrainError | None

    def wait(self, timeout: Duration | None = None) -> bool:
        """Wait for the result; True once it is there.

        Raises: CollectiveTimeoutError after `timeout` (default: the group's), BackendError when the transport failed.
        """
        call_arguments, recorder = self._call_arguments, self._recorder
        call_arguments[1].waiting_in = call_arguments[2]
        if recorder is not None:
            recorder.waits(self._record)
        try:
            if timeout is None:
                self._started.wait()
            else:
                self._started.wait(timedelta(seconds=seconds("wait", timeout)))
        except Exception as error:
            raise self._failed(error) from error
        # A future's callback may have told it.
        if recorder is not None and self._recorder is not None:
            self._recorder = None
            recorder.end(self._record, None)
        if self._call is not None:
            self._call.completed(None)
        return True

    def _failed(self, error: Exception) -> DisttrainError:
        """Translates the `error` of the transport, and tells the recorder and the observers of it."""
        call = Call(*self._call_arguments) if self._call is None else self._call
        self._error = call.failure(error)
        self._tell_recorder(self._error)
        call.completed(self._error)
        return self._error

    def _tell_recorder(self, error: DisttrainError | None) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.end(self._record, error)

    def is_completed(self) -> bool:
        """True when the collective has ended, well or not; never waits."""
        return self._started.is_completed()

    def exception(self) -> DisttrainError | None:
        """The error the collective ended with, if any; None while it is under way."""
        if self._error is None and self.is_completed():
            try:
                self.wait()
            except DisttrainError as error:
                return error
        return self._error

    def is_success(self) -> bool:
        """True when the collective has ended well; never waits."""
        return self.is_completed() and self.exception() is None

    def result(self) -> list[torch.Tensor]:
        """The collective's outputs, which are there once it has ended."""
        return list(self._call_arguments[4])

    def synchronize(self) -> None:
        """As `wait`, which on CUDA orders the current stream alone."""
        self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the collective's outputs, for callbacks. Gloo's messages have none."""
        outputs = list(self._call_arguments[4])

        def value(done: torch.futures.Future[Any]) -> list[torch.Tensor]:
            done.value()
            return outputs

        return self._started.get_future().then(value)

    def transport_future(self) -> torch.futures.Future[Any]:
        """The transport's own future, for who waits for that alone: the recorder is told when it is done."""
        future = self._started.get_future()
        future.add_done_callback(lambda _: self._tell_recorder(None))
        return future

    def source_rank(self) -> int:
        """The global rank that a message came from, once it has."""
        return self._call_arguments[1].members[self.source_group_rank()]

    def source_group_rank(self) -> int:
        """Likewise, its rank in the group."""
        peer_rank = self._call_arguments[5]
        if peer_rank is None:
            peer_rank = self._started.source_rank()  # type: ignore[attr-defined]  # what receives from anyone has it
        return peer_rank

    def _source_rank(self) -> int:
        """torch's name for `source_group_rank`."""
        return self.source_group_rank()

    def follow(self, whole: TransportWork) -> None:
        """The transport has made this operation a part of `whole`: wait for that first."""
        self._started = JoinedWork([whole, self._started])
