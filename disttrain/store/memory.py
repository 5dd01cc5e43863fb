"""A store in one process, shared by its threads: the server's state machine with a lock around it and no server."""

from __future__ import annotations

import itertools
import threading
from typing import Any, Self

from disttrain.errors import StoreConnectionError
from disttrain.store.durations import Duration
from disttrain.store.protocol.limits import Limits
from disttrain.store.protocol.methods import StoreMethods
from disttrain.store.protocol.state import NEVER_S, Outgoing, StoreState
from disttrain.store.protocol.wire import Answer, Op


class _Call:
    """A request of `owner`; `wake` is held until there is an answer, or the owner has closed."""

    __slots__ = ("answer", "owner", "wake")

    def __init__(self, owner: HashStore) -> None:
        self.owner = owner
        self.answer: Answer | None = None
        self.wake = threading.Lock()
        self.wake.acquire()


class _Core:
    """The state that a store and its clones share. Whoever waits looks after its own deadline."""

    def __init__(self, limits: Limits | None) -> None:
        self._state = StoreState(limits)
        self._mutex = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count()

    def request(self, owner: HashStore, op: Op, arguments: tuple[Any, ...], wait_s: float) -> Answer | None:
        """The answer; None when `owner` closed before it came."""
        call = _Call(owner)
        request_id = next(self._ids)
        with self._mutex:
            self._calls[request_id] = call
            # Each request is a connection of its own, so that one can be given up without the others.
            self._deliver(self._state.handle(request_id, [request_id, op, *arguments], NEVER_S))
        try:
            if not call.wake.acquire(timeout=wait_s):
                with self._mutex:
                    self._deliver(self._state.give_up(request_id))
        except BaseException:
            with self._mutex:
                self._forget(request_id)
            raise
        return call.answer

    def close(self, owner: HashStore) -> None:
        """Wake whoever waits through `owner`."""
        with self._mutex:
            for request_id, call in list(self._calls.items()):
                if call.owner is owner:
                    self._forget(request_id)
                    call.wake.release()

    def _forget(self, request_id: int) -> None:
        self._calls.pop(request_id, None)
        self._state.disconnect(request_id)

    def _deliver(self, replies: list[Outgoing]) -> None:
        for _, (request_id, status, value) in replies:
            call = self._calls.pop(request_id)
            call.answer = (status, value)
            call.wake.release()


class HashStore(StoreMethods):
    """A store for the threads of one process, and for tests. Satisfies `Store`; clones share their keys."""

    def __init__(self, timeout: Duration = 300.0, limits: Limits | None = None) -> None:
        super().__init__("HashStore", timeout, "")
        self._core = _Core(limits)
        self._is_closed = False

    def clone(self) -> Self:
        """The same keys, to be closed on its own."""
        other = type(self)(self._timeout_s)
        other._core = self._core
        return other

    def close(self) -> None:
        """Fail every request under way through this object and all that follow. Idempotent."""
        self._is_closed = True
        self._core.close(self)

    def _request(self, op: Op, arguments: tuple[Any, ...], wait_s: float) -> Answer:
        answer = None if self._is_closed else self._core.request(self, op, arguments, wait_s)
        if answer is None:
            raise StoreConnectionError(op.name.lower(), "this HashStore was closed.", "Use a clone, or a new one.")
        return answer
