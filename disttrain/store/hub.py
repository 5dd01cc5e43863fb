"""All of a server's connections: framing, authentication and state in one place. Bytes in, actions out; no sockets.

The libuv shells only move bytes and timers: they tell the hub what happened, and do what it answers.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from disttrain.store.handshake import ServerHandshake
from disttrain.store.limits import Limits, over_limit
from disttrain.store.sessions import SESSION_S, Session, Sessions
from disttrain.store.state import StoreState
from disttrain.store.wire import (
    HANDSHAKE_FRAME_BYTES,
    HEADER_BYTES,
    READING,
    Decoder,
    Encoder,
    Message,
    Op,
    Status,
    WireError,
)

HANDSHAKE_S: Final = 5.0
"""Seconds that a peer has to prove that it knows the token."""

_LATE_S: Final = 0.5

NOT_A_REQUEST: Final = -1
"""The request_id of a server's last words to a client that breaks the protocol."""

_CHANGES: Final = {int(op): op not in READING for op in Op if op < Op.CANCEL}
"""Which operations change something; those that concern the session are missing."""

Action = tuple[int, bytes, str]
"""(connection, bytes to write, why to hang up afterwards or "")."""


class _Connection:
    """One connection; it has a session once the handshake is over."""

    __slots__ = ("decoder", "handshake", "num_bytes", "session")

    def __init__(self, token: str | None, certificate: bytes) -> None:
        self.decoder = Decoder(HANDSHAKE_FRAME_BYTES)
        self.handshake: ServerHandshake | None = ServerHandshake(token, certificate)
        self.session: Session | None = None
        self.num_bytes = 0
        """That came during the handshake."""


class Hub:
    """The server, but for its sockets and its clock. Connections are numbered by who calls.

    `certificate` is the digest of the one that the server shows, b"" without TLS.
    """

    def __init__(self, token: str | None = None, limits: Limits | None = None, certificate: bytes = b"") -> None:
        self.limits = limits or Limits()
        self.state = StoreState(self.limits)
        self.num_clients = 0
        self.has_new_deadline = False
        """Something may have to be done earlier than `next_deadline_s` said; who sets the timer clears it."""
        self._token = token
        self._certificate = certificate
        self._encode = Encoder().encode
        self._connections: dict[int, _Connection] = {}
        self._sessions = Sessions()
        # Until when each may take, in the order in which they came. (A dict would find its first slower and slower.)
        self._unproved: OrderedDict[int, float] = OrderedDict()

    @property
    def next_deadline_s(self) -> float | None:
        """When `tick` wants to be called."""
        unproved = next(iter(self._unproved.values()), None)
        deadlines = (self.state.next_deadline_s, self._sessions.next_deadline_s, unproved)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def connected(self, connection: int, now_s: float) -> list[Action]:
        """Somebody connected; the number must be new."""
        peer = self._connections[connection] = _Connection(self._token, self._certificate)
        assert peer.handshake is not None
        self._unproved[connection] = now_s + HANDSHAKE_S
        self.has_new_deadline = True
        actions: list[Action] = [(connection, self._encode(peer.handshake.hello()), "")]
        if len(self._unproved) > max(1, self.limits.num_unproved):
            # The oldest: a client needs a moment only, a peer that means to stay for its five seconds is overtaken.
            oldest = next(iter(self._unproved))
            reason = f"{self.limits.num_unproved} later peers have not proved either that they know the token"
            actions += self._hang_up(oldest, reason, now_s)
        return actions

    def is_proved(self, connection: int) -> bool:
        """Whether this is a client; False for a peer that may still have to prove that it knows the token."""
        peer = self._connections.get(connection)
        return peer is not None and peer.session is not None

    def received(self, connection: int, data: bytes, now_s: float) -> list[Action]:
        """Bytes came. Those of a connection that was told to hang up are ignored."""
        peer = self._connections.get(connection)
        if peer is None:
            return []
        session = peer.session
        if session is None:
            return self._greet(connection, peer, data, now_s)
        try:
            messages = peer.decoder.feed(data)
        except WireError as error:
            return self._hang_up(connection, error.problem, now_s)
        own: list[bytes] = []
        actions: list[Action] = []
        for message in messages:
            changes = _changes(message)
            if changes is None:
                told = self._special(session, message)
                if told is not None:
                    own.append(self._encode(told))
                    continue
                changes = message[1] not in READING
            replies = self.state.handle(connection, message, now_s)
            if not replies:
                self.has_new_deadline = True
                if changes:
                    session.waiting.add(message[0])
                continue
            reply = replies[0][1]
            if changes:
                session.keep(reply)
            own.append(self._encode(reply))
            if len(replies) > 1:
                actions += map(self._woken, replies[1:])
        if own:
            actions.append((connection, own[0] if len(own) == 1 else b"".join(own), ""))
        return actions

    def disconnected(self, connection: int, now_s: float) -> None:
        """The connection is gone, whoever ended it. Idempotent."""
        peer = self._connections.pop(connection, None)
        self._unproved.pop(connection, None)
        if peer is not None and peer.session is not None:
            self.num_clients -= 1
            self.state.disconnect(connection)
            self._sessions.cut_off(peer.session, now_s)
            self.has_new_deadline = True

    def tick(self, now_s: float) -> list[Action]:
        """Time has passed: answers requests that are over, hangs up on peers that did not prove anything."""
        actions: list[Action] = [self._woken(outgoing) for outgoing in self.state.expire(now_s)]
        actions += self._hang_up_on_silent(now_s)
        self._sessions.tick(now_s)
        return actions

    def _hang_up_on_silent(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        late_s = now_s - next(iter(self._unproved.values()), now_s)
        if late_s > _LATE_S:
            # It was us who were busy or frozen, and proofs may have come that we have not read: that time does not
            # count, and there is as much again for reading them.
            peers = self._unproved.items()
            self._unproved = OrderedDict((connection, deadline_s + 2 * late_s) for connection, deadline_s in peers)
        while self._unproved:
            connection, deadline_s = next(iter(self._unproved.items()))
            if deadline_s > now_s:
                break
            actions += self._hang_up(connection, f"no proof of the token within {HANDSHAKE_S:g} s", now_s)
        return actions

    def _special(self, session: Session, message: Message) -> Message | None:
        """What concerns the session; a reply if that is all, None where the state must be asked."""
        request_id, op = message[:2]
        if type(request_id) is not int or type(op) is not int:
            return None
        if op < 0:
            message[1] = -op
            return None if -op in READING else session.told(request_id)
        if op == Op.LEAVE:
            self._sessions.end(session)
            return [request_id, int(Status.OK), None]
        if op == Op.CANCEL and len(message) > 2 and type(message[2]) is int:
            session.waiting.discard(message[2])
        return None

    def _woken(self, outgoing: tuple[int, Message]) -> Action:
        """The answer to a request that was parked."""
        connection, reply = outgoing
        session = self._connections[connection].session
        assert session is not None
        if reply[0] in session.waiting:
            session.waiting.discard(reply[0])
            session.keep(reply)
        return connection, self._encode(reply), ""

    def _greet(self, connection: int, peer: _Connection, data: bytes, now_s: float) -> list[Action]:
        """A peer that has proved nothing yet sent `data`: no more than one small frame is even decoded."""
        peer.num_bytes += len(data)
        if peer.num_bytes > HEADER_BYTES + HANDSHAKE_FRAME_BYTES:
            return self._hang_up(connection, "more than one small frame before authentication", now_s)
        try:
            messages = peer.decoder.feed(data)
        except WireError as error:
            return self._hang_up(connection, error.problem, now_s)
        if len(messages) > 1:
            return self._hang_up(connection, "more than one frame before authentication", now_s)
        return self._admit(connection, peer, messages[0], now_s) if messages else []

    def _admit(self, connection: int, peer: _Connection, answer: Message, now_s: float) -> list[Action]:
        """A peer answers our hello: let it in, as a new client or one that comes back, or say why not."""
        assert peer.handshake is not None
        handshake = peer.handshake
        verdict = handshake.verdict(answer, self.limits.frame_bytes)
        session = self._sessions.resume(handshake.session) if handshake.resumes else None
        if verdict[0] == Status.OK and handshake.resumes and session is None:
            verdict = [int(Status.GONE), f"the server knows no such client; it waits {SESSION_S:g} s for one"]
        elif verdict[0] == Status.OK and session is None and self.num_clients >= self.limits.num_clients:
            text = over_limit("the store", self.num_clients + 1, "num_clients", self.limits)
            verdict = [int(Status.LIMIT), text]
        if verdict[0] != Status.OK:
            self.disconnected(connection, now_s)
            return [(connection, self._encode(verdict), verdict[1])]
        actions: list[Action] = []
        if session is not None and session.connection is not None:
            old = session.connection
            self.disconnected(old, now_s)
            actions.append((old, b"", "its client has come back on another connection"))
        if session is None:
            session = self._sessions.begin(handshake.session, connection)
        session.connection = connection
        peer.session = session
        peer.handshake = None
        del self._unproved[connection]
        peer.decoder.max_frame_bytes = self.limits.frame_bytes
        self.num_clients += 1
        return [*actions, (connection, self._encode(verdict), "")]

    def _hang_up(self, connection: int, reason: str, now_s: float) -> list[Action]:
        # Strangers get no explanation; a client that lost its way gets one.
        session = self._connections[connection].session
        last_words = b""
        if session is not None:
            self._sessions.end(session)
            last_words = self._encode([NOT_A_REQUEST, int(Status.REFUSED), reason])
        self.disconnected(connection, now_s)
        return [(connection, last_words, reason)]


def _changes(message: Message) -> bool | None:
    """Whether the request may change something; None: it concerns the session, or is no operation."""
    try:
        return _CHANGES.get(message[1])
    except (IndexError, TypeError):
        return True
