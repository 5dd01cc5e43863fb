"""All of a server's connections: framing, authentication and state in one place. Bytes in, actions out; no sockets.

The libuv shells only move bytes and timers: they tell the hub what happened, and do what it answers.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from disttrain.store.handshake import ServerHandshake
from disttrain.store.limits import Limits
from disttrain.store.state import StoreState
from disttrain.store.wire import HANDSHAKE_FRAME_BYTES, Decoder, Message, Status, WireError, encode

HANDSHAKE_S: Final = 5.0
"""Seconds that a peer has to prove that it knows the token."""

NOT_A_REQUEST: Final = -1
"""The request_id of a server's last words to a client that breaks the protocol."""

Action = tuple[int, bytes, str]
"""(connection, bytes to write, why to hang up afterwards or "")."""


class _Session:
    """One connection."""

    __slots__ = ("decoder", "handshake")

    def __init__(self, token: str | None) -> None:
        self.decoder = Decoder(HANDSHAKE_FRAME_BYTES)
        self.handshake: ServerHandshake | None = ServerHandshake(token)


class Hub:
    """The server, but for its sockets and its clock. Connections are numbered by who calls."""

    def __init__(self, token: str | None = None, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.state = StoreState(self.limits)
        self.num_clients = 0
        self._token = token
        self._sessions: dict[int, _Session] = {}
        self._unproved: deque[tuple[float, int]] = deque()

    @property
    def next_deadline_s(self) -> float | None:
        """When `tick` wants to be called."""
        requests = self.state.next_deadline_s
        if not self._unproved:
            return requests
        handshakes = self._unproved[0][0]
        return handshakes if requests is None else min(handshakes, requests)

    def connected(self, connection: int, now_s: float) -> list[Action]:
        """Somebody connected; the number must be new."""
        session = self._sessions[connection] = _Session(self._token)
        assert session.handshake is not None
        self._unproved.append((now_s + HANDSHAKE_S, connection))
        return [(connection, encode(session.handshake.hello()), "")]

    def received(self, connection: int, data: bytes, now_s: float) -> list[Action]:
        """Bytes came. Those of a connection that was told to hang up are ignored."""
        session = self._sessions.get(connection)
        if session is None:
            return []
        try:
            messages = session.decoder.feed(data)
        except WireError as error:
            return self._hang_up(connection, error.problem)
        if session.handshake is not None:
            return self._greet(connection, session, messages) if messages else []
        actions: list[Action] = []
        for message in messages:
            for target, reply in self.state.handle(connection, message, now_s):
                actions.append((target, encode(reply), ""))
        return actions

    def disconnected(self, connection: int) -> None:
        """The connection is gone, whoever ended it. Idempotent."""
        session = self._sessions.pop(connection, None)
        if session is not None and session.handshake is None:
            self.num_clients -= 1
            self.state.disconnect(connection)

    def tick(self, now_s: float) -> list[Action]:
        """Time has passed: answers requests that are over, hangs up on peers that did not prove anything."""
        actions: list[Action] = [(target, encode(reply), "") for target, reply in self.state.expire(now_s)]
        while self._unproved and self._unproved[0][0] <= now_s:
            connection = self._unproved.popleft()[1]
            session = self._sessions.get(connection)
            if session is not None and session.handshake is not None:
                actions += self._hang_up(connection, f"no proof of the token within {HANDSHAKE_S:g} s")
        return actions

    def _greet(self, connection: int, session: _Session, messages: list[Message]) -> list[Action]:
        assert session.handshake is not None
        if len(messages) > 1:
            return self._hang_up(connection, "more than one frame before authentication")
        verdict = session.handshake.verdict(messages[0], self.limits.frame_bytes)
        if verdict[0] != Status.OK:
            self.disconnected(connection)
            return [(connection, encode(verdict), verdict[1])]
        session.handshake = None
        session.decoder.max_frame_bytes = self.limits.frame_bytes
        self.num_clients += 1
        return [(connection, encode(verdict), "")]

    def _hang_up(self, connection: int, reason: str) -> list[Action]:
        # Strangers get no explanation; a client that lost its way gets one.
        is_client = self._sessions[connection].handshake is None
        last_words = encode([NOT_A_REQUEST, int(Status.REFUSED), reason]) if is_client else b""
        self.disconnected(connection)
        return [(connection, last_words, reason)]
