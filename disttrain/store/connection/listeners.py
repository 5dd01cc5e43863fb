"""The one connection that all listeners of a store share: threads that mostly wait, each closed on its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from disttrain.store.connection.channel import Channel
from disttrain.store.connection.forks import FORKS
from disttrain.store.protocol.wire import Answer, Op


class Listener:
    """One user of the shared connection: as a `Channel` that is its own."""

    def __init__(self, shared: SharedChannel, channel: Channel) -> None:
        self._shared = shared
        self.channel = channel
        self.is_closed = False

    def request(self, op: Op, arguments: tuple[Any, ...], wait_s: float) -> Answer:
        """See `Channel.request`."""
        return self.channel.request(op, arguments, wait_s, self)

    def close(self) -> None:
        """Fail every request of this listener. Idempotent."""
        self._shared.leave(self)

    def break_link(self) -> None:
        """See `Channel.break_link`."""
        self.channel.break_link()


class SharedChannel:
    """Opened for the first listener, and closed with the last one."""

    def __init__(self) -> None:
        self._num_forks = FORKS.num_forks
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []

    @property
    def is_ours(self) -> bool:
        """False in a fork of the process that made it."""
        return self._num_forks == FORKS.num_forks

    def join(self, connect: Callable[[], Channel]) -> Listener:
        """One more listener; `connect` opens the connection, where there is none that is of use."""
        with self._lock:
            channel = next((each.channel for each in self._listeners if not each.channel.is_broken), None)
            listener = Listener(self, connect() if channel is None else channel)
            self._listeners.append(listener)
            return listener

    def leave(self, listener: Listener) -> None:
        """Ends a listener: its wait fails, and the connection ends where nobody else has it. Idempotent."""
        with self._lock:
            if listener.is_closed:
                return
            listener.is_closed = True
            self._listeners.remove(listener)
            is_last = all(other.channel is not listener.channel for other in self._listeners)
        if is_last:
            listener.channel.close()
        else:
            listener.channel.release(listener)
