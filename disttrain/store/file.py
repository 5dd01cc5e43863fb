"""A store in a shared file: no server, no ports; for processes that share a file system.

State machine replication: the file is a log of requests, and each process applies them all, in the file's order, to its
own `StoreState`. All get the same keys and values, and each finds the replies to its own requests on the way. Requests
that only read use the local state and are not written. Others' writes are found by checking the file's size at growing
intervals, 20 ms at most: file systems have no events that work everywhere.

A process that is killed while it is in a barrier, or waits at a queue, stays counted there, unlike with a server that
notices its end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Self

from disttrain.errors import DisttrainError, StoreConnectionError, StoreTimeoutError
from disttrain.store.durations import Duration
from disttrain.store.file_log import FileLog, pauses
from disttrain.store.protocol.limits import Limits
from disttrain.store.protocol.methods import StoreMethods
from disttrain.store.protocol.state import NEVER_S, Outgoing, StoreState
from disttrain.store.protocol.wire import READING, Answer, Message, Op

_GIVE_UP: Final = -1
"""In place of an op: the requester waits no longer."""

_OVER: Final = object()
_GIVE_UP_S: Final = 2.0
_LET_GO_S: Final = 0.2
_ID_BYTES: Final = 7
_CLOSE: Final = -2
"""In place of an op: one of those who share the file, `world_size` at least, has closed it."""
_OPEN: Final = -3
"""In place of an op: one of them has come."""


class FileStore(StoreMethods):
    """A store in the file `path`, which must be new for each job. Satisfies `Store`; argument names are torch's.

    Args: world_size  how many FileStores will use the file: the last one to close, or to be let go of, removes it; -1:
          nobody does;
          timeout  how long an operation waits by default.
    """

    def __init__(self, path: str | os.PathLike[str], world_size: int = -1, timeout: Duration = 300.0) -> None:
        super().__init__("FileStore", timeout, os.fspath(path))
        self._world_size = world_size
        self._is_closed = False
        self._open()
        if world_size > 0:
            deadline_s = time.monotonic() + self._timeout_s
            with self._turn(Op.NUM_KEYS, deadline_s):
                self._write([0, _OPEN], deadline_s)

    def __del__(self) -> None:
        # As torch's. It may come while this thread has locked the file through another store: no long wait.
        with suppress(Exception):
            self._close(_LET_GO_S)

    @property
    def path(self) -> str:
        """The file."""
        return self._where

    def _open(self) -> None:
        limits = Limits()
        self._pid = os.getpid()
        self._log = FileLog(self._where, limits.frame_bytes)
        self._state = StoreState(limits)
        self._mutex = threading.Lock()
        self._answers: dict[int, Answer | None] = {}
        self._num_opened = self._num_closed = 0

    def clone(self) -> Self:
        """The same file, to be closed on its own; it does not count among the `world_size`."""
        return type(self)(self._where, timeout=self._timeout_s)

    def close(self) -> None:
        """Fail every request under way through this object and all that follow. Idempotent."""
        self._close(self._timeout_s)

    def _close(self, wait_s: float) -> None:
        if self._is_closed or os.getpid() != self._pid:
            return
        deadline_s = time.monotonic() + wait_s
        with self._turn(Op.NUM_KEYS, deadline_s):
            self._is_closed = True
            if self._world_size > 0:
                self._write([0, _CLOSE], deadline_s)
                if self._world_size <= self._num_closed == self._num_opened:
                    os.unlink(self._where)
            self._log.close()

    def _request(self, op: Op, arguments: tuple[Any, ...], wait_s: float) -> Answer:
        if os.getpid() != self._pid:
            # We were forked: the parent's locks, offset and descriptor are not ours to use.
            self._log.close()
            self._open()
        request_id = int.from_bytes(os.urandom(_ID_BYTES), "big")
        deadline_s = time.monotonic() + wait_s
        self._answers[request_id] = None
        try:
            self._begin(op, [request_id, op, *arguments], deadline_s)
            return self._poll(op, request_id, deadline_s)
        except DisttrainError:
            raise
        except BaseException:
            self._give_up(op, request_id)
            raise
        finally:
            del self._answers[request_id]

    def _begin(self, op: Op, request: Message, deadline_s: float) -> None:
        with self._turn(op, deadline_s):
            if op in READING:
                self._apply_new()
                self._deliver(self._state.handle(request[0], request, NEVER_S))
            else:
                self._write(request, deadline_s)

    def _poll(self, op: Op, request_id: int, deadline_s: float) -> Answer:
        waiting = pauses(deadline_s)
        while (answer := self._answers[request_id]) is None:
            if next(waiting, _OVER) is _OVER:
                self._give_up(op, request_id)
            else:
                with self._turn(op, deadline_s + _GIVE_UP_S):
                    self._apply_new()
        return answer

    def _give_up(self, op: Op, request_id: int) -> None:
        """Time the request out, unless its answer is there after all."""
        deadline_s = time.monotonic() + _GIVE_UP_S
        with self._turn(op, deadline_s):
            if op in READING:
                self._deliver(self._state.give_up(request_id))
            else:
                self._write([request_id, _GIVE_UP], deadline_s)

    def _write(self, record: Message, deadline_s: float) -> None:
        with self._log.locked(deadline_s):
            self._apply_new()
            self._log.append(record)
            self._apply_new()

    def _apply_new(self) -> None:
        for record in self._log.new_records():
            request_id, op = record[:2]
            if op == _CLOSE:
                self._num_closed += 1
            elif op == _OPEN:
                self._num_opened += 1
            elif op == _GIVE_UP:
                self._deliver(self._state.give_up(request_id))
            else:
                self._deliver(self._state.handle(request_id, record, NEVER_S))

    def _deliver(self, replies: list[Outgoing]) -> None:
        for _, (request_id, status, value) in replies:
            if request_id in self._answers:
                self._answers[request_id] = (status, value)

    @contextmanager
    def _turn(self, op: Op, deadline_s: float) -> Iterator[None]:
        """Gives this thread alone the file and the state."""
        if not self._mutex.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            problem = "other threads have used this store for the whole timeout."
            raise StoreTimeoutError(op.name.lower(), problem, "Give each thread a clone.", where=self._where)
        try:
            if self._is_closed:
                raise StoreConnectionError(
                    op.name.lower(), "this FileStore was closed.", "Use a clone, or a new one.", where=self._where
                )
            yield
        finally:
            self._mutex.release()
