"""Parts that the two libuv shells share: connections, the hub's actions, the end.

A shell subclasses `Shell` with seven methods (run, stop, stop listening, timer, call, watch, unwatch) and hands it a
`Peer` for each connection.
"""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, Protocol

from disttrain.store.protocol.limits import Limits
from disttrain.store.serving.lead import NOBODY
from disttrain.store.serving.log import Log
from disttrain.store.standby.journal import Action
from disttrain.store.standby.replica import Replica

LONGEST_TIMER_S: Final = 3600.0
"""libuv counts milliseconds in 64 bits, which a client's timeout may pass; a timer that fires early does no harm."""


class AnyHub(Protocol):
    """The methods of a hub that a shell calls: `Hub`, or one behind TLS."""

    has_new_deadline: bool

    @property
    def limits(self) -> Limits: ...

    @property
    def is_deposed(self) -> bool: ...

    @property
    def num_clients(self) -> int: ...

    @property
    def next_deadline_s(self) -> float | None: ...

    def connected(self, connection: int, now_s: float) -> list[Action]: ...

    def received(self, connection: int, data: bytes, now_s: float) -> list[Action]: ...

    def disconnected(self, connection: int, now_s: float) -> None: ...

    def tick(self, now_s: float) -> list[Action]: ...

    def take_over(self, replica: Replica, now_s: float) -> None: ...

    def close(self) -> None: ...


class Peer(Protocol):
    """One connection, as a shell sees it."""

    name: str
    """Numeric address, for the log."""

    def write(self, data: bytes) -> int:
        """Send or queue `data`; returns how many bytes are queued now. Never raises, never calls back."""
        ...

    def close(self) -> None:
        """End the connection soon, after what was written if the peer reads it. Idempotent; ends in `Shell.lost`."""
        ...

    def abort(self) -> None:
        """End it now. Idempotent; ends in `Shell.lost`."""
        ...


class Shell(ABC):
    """Moves bytes and timers between sockets and a hub, until its parent and then its clients are gone."""

    def __init__(self, hub: AnyHub, linger_s: float, released: Callable[[], None]) -> None:
        """`released` is called once nobody listens at the address any more."""
        self._hub = hub
        self._released = released
        self._linger_s = linger_s
        self._peers: dict[int, Peer] = {}
        self._num_connected = 0
        self._timer_s = float("inf")
        self._ends_s: float | None = None
        self._log = Log()

    @abstractmethod
    def run(self, listener: socket.socket, parent: int) -> None:
        """Serve on `listener` until `stop`; `parent` is the descriptor whose end says that the parent is gone."""

    @abstractmethod
    def stop(self) -> None:
        """Make `run` return."""

    @abstractmethod
    def stop_listening(self) -> None:
        """Take no more peers, and let others have the address."""

    @abstractmethod
    def start_timer(self, delay_s: float) -> None:
        """Call `tick` after `delay_s`, instead of when it was asked before."""

    @abstractmethod
    def call_soon(self, function: Callable[[], None]) -> None:
        """Let the loop call `function`; from any thread."""

    @abstractmethod
    def watch(self, connection: socket.socket, readable: Callable[[], None]) -> None:
        """Call `readable` whenever `connection`, which is not a peer's, has something to read, until `unwatch`."""

    @abstractmethod
    def unwatch(self, connection: socket.socket) -> None:
        """See `watch`; before it is closed."""

    def carry_out(self, actions: list[Action]) -> None:
        """Do what a hub has answered to something that came from no peer."""
        self._do(actions, time.monotonic())

    def take_over(self, replica: Replica) -> None:
        """Serve what a standby knows."""
        now_s = time.monotonic()
        self._log.say("disttrain store: the leader is gone; its standby has taken over", now_s)
        self._hub.take_over(replica, now_s)
        self._set_timer(now_s)

    def give_up(self, reason: str) -> None:
        """A standby that cannot take over any more ends: nobody shall wait for it."""
        self.end(f"this standby is of no use any more: {reason}")

    def end(self, reason: str) -> None:
        """Serve nobody any more."""
        self._log.say(f"disttrain store: {reason}", time.monotonic())
        self.stop()

    def connected(self, peer: Peer) -> int:
        """A peer came; returns its number."""
        self._num_connected += 1
        connection = self._num_connected
        self._peers[connection] = peer
        now_s = time.monotonic()
        self._do(self._hub.connected(connection, now_s), now_s)
        return connection

    def received(self, connection: int, data: bytes) -> None:
        """A peer sent `data`."""
        now_s = time.monotonic()
        self._do(self._hub.received(connection, data, now_s), now_s)

    def lost(self, connection: int) -> None:
        """The connection has ended. Idempotent."""
        self._peers.pop(connection, None)
        now_s = time.monotonic()
        self._hub.disconnected(connection, now_s)
        self._stop_when_alone()
        self._set_timer(now_s)

    def parent_gone(self) -> None:
        """Nobody holds the server any more: it ends with its last client, or when it has lingered long enough."""
        # Whoever comes to this address from now on is looking for the next job's store.
        self.stop_listening()
        self._released()
        self._hub.close()
        now_s = time.monotonic()
        self._ends_s = now_s + self._linger_s
        self._stop_when_alone()
        self._set_timer(now_s)

    def tick(self) -> None:
        """The timer fired."""
        self._timer_s = float("inf")
        now_s = time.monotonic()
        if self._ends_s is not None and self._ends_s <= now_s:
            self.stop()
        self._hub.has_new_deadline = True
        self._do(self._hub.tick(now_s), now_s)

    def _stop_when_alone(self) -> None:
        if self._ends_s is not None and not self._hub.num_clients:
            self.stop()

    def _do(self, actions: list[Action], now_s: float) -> None:
        hub = self._hub
        for connection, data, reason in actions:
            peer = self._peers.get(connection)
            if peer is None:
                if connection == NOBODY:
                    self._log.say(f"disttrain store: {reason}", now_s)
                continue
            num_unread_bytes = peer.write(data) if data else 0
            if reason:
                self._drop(connection, reason, now_s)
                peer.close()
            elif num_unread_bytes and num_unread_bytes > hub.limits.unread_bytes:
                self._drop(connection, f"it left {num_unread_bytes} bytes of replies unread", now_s)
                peer.abort()
        if hub.has_new_deadline:
            self._set_timer(now_s)

    def _drop(self, connection: int, reason: str, now_s: float) -> None:
        self._log.say(f"disttrain store: hung up on {self._peers[connection].name}: {reason}", now_s)
        self._hub.disconnected(connection, now_s)
        self._stop_when_alone()

    def _set_timer(self, now_s: float) -> None:
        self._hub.has_new_deadline = False
        if self._hub.is_deposed:
            self._log.say("disttrain store: ends, since its standby has taken over or may do so", now_s)
            self.stop()
        deadline_s = self._hub.next_deadline_s
        if self._ends_s is not None:
            deadline_s = self._ends_s if deadline_s is None else min(deadline_s, self._ends_s)
        if deadline_s is not None and deadline_s < self._timer_s:
            self._timer_s = deadline_s
            # libuv counts in milliseconds.
            self.start_timer(min(max(0.001, deadline_s - now_s), LONGEST_TIMER_S))


def shown_address(address: object) -> str:
    """A socket's address for the log."""
    host, port = address[:2] if isinstance(address, tuple) else ("a process of this machine, or who has gone", 0)
    return f"{host.removeprefix('::ffff:')}:{port}" if port else str(host)
