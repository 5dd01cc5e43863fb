"""Handles a server's connections: framing, authentication and state in one place. Bytes in, actions out; no sockets.

The libuv shells only move bytes and timers: they tell the hub what happened, and do what it answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from disttrain.store.protocol.handshake import ServerHandshake, Votes
from disttrain.store.protocol.limits import Limits, over_limit
from disttrain.store.protocol.sessions import SESSION_S, Session, Sessions
from disttrain.store.protocol.state import StoreState
from disttrain.store.protocol.wire import (
    COUNTED,
    HANDSHAKE_FRAME_BYTES,
    HEADER_BYTES,
    NOT_A_REQUEST,
    READING,
    Decoder,
    Encoder,
    Message,
    Op,
    Status,
    WireError,
)
from disttrain.store.serving.lead import Lead
from disttrain.store.standby.journal import Action, Entry
from disttrain.store.standby.replica import Replica, present_state

HANDSHAKE_S: Final = 5.0
"""Seconds that a peer has to prove that it knows the token."""

_LATE_S: Final = 0.5

_OF_SESSIONS: Final = (Op.CANCEL, Op.LEAVE, Op.FOLLOW, Op.ACK, Op.ELECT)
_CHANGES: Final = {int(op): op not in READING for op in Op if op not in _OF_SESSIONS}
"""Operations by whether they change something; those that concern the session are missing."""
_BARRIER_EACH: Final = Op.BARRIER_EACH


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
    """The server, but for its sockets and its clock. Connections are numbered by who calls, from 1.

    Args: certificate  digest of the one that the server shows, b"" without TLS;  votes  of a standby, which lets
          nobody in until it takes over: where it leaves what electors say that have lost its leader.
    """

    def __init__(
        self,
        token: str | None = None,
        limits: Limits | None = None,
        certificate: bytes = b"",
        *,
        votes: Votes | None = None,
    ) -> None:
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
        self._votes = votes
        self._lead = Lead(self._clients, self._present, self.limits.unread_bytes)
        # Until when each may take, in the order in which they came. (A dict would find its first slower and slower.)
        self._unproved: OrderedDict[int, float] = OrderedDict()

    @property
    def next_deadline_s(self) -> float | None:
        """The next time to call `tick`."""
        unproved = next(iter(self._unproved.values()), None)
        deadlines = (self.state.next_deadline_s, self._sessions.next_deadline_s, unproved, self._lead.deadline_s)
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
        """True for a client; False for a peer that may still have to prove that it knows the token."""
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
        actions = self._answers(connection, session, messages, now_s)
        return actions if self._lead.journal is None else self._lead.after(actions, now_s)

    def _answers(self, connection: int, session: Session, messages: list[Message], now_s: float) -> list[Action]:
        """Actions that follow from a client's requests, for it and for others."""
        encoded: list[bytes] = []
        woken: list[tuple[int, Message]] = []
        farewell: list[Action] = []
        for message in messages:
            if message and self.state.waits(connection, message[0]):
                # Of two answers by one id nobody could say whose each is, the standby neither.
                farewell = self._hang_up(connection, f"request {message[0]} waits for its answer already", now_s)
                break
            changes = _changes(message)
            if changes is None:
                special = self._special(connection, session, message, now_s)
                if special is not None:
                    encoded.append(special)
                    if connection not in self._connections:
                        break
                    continue
                changes = message[1] not in READING
            if changes and self._lead.journal is not None:
                self._lead.journal.note(Entry.REQUEST, session.name, message)
            replies = self.state.handle(connection, message, now_s)
            if not replies:
                # A proxy has no deadlines of its own.
                self.has_new_deadline |= self.state.next_deadline_s is not None
                if changes:
                    encoded += self._waiting(session, message)
                continue
            reply = replies[0][1]
            if changes:
                session.keep(reply)
            encoded.append(self._encode(reply))
            if len(replies) > 1:
                woken += replies[1:]
        actions = self._woken_together(woken) if woken else []
        if encoded:
            actions.append((connection, encoded[0] if len(encoded) == 1 else b"".join(encoded), ""))
        actions += farewell
        return actions

    def _waiting(self, session: Session, message: Message) -> list[bytes]:
        """A request that changes something has to wait; what its client is told of that."""
        session.waiting.add(message[0])
        return [self._encode([COUNTED, int(Status.OK), message[0]])] if message[1] == _BARRIER_EACH else []

    def disconnected(self, connection: int, now_s: float) -> None:
        """The connection is gone, whoever ended it. Idempotent."""
        peer = self._connections.pop(connection, None)
        self._unproved.pop(connection, None)
        if peer is not None and peer.session is not None:
            self.num_clients -= 1
            self.state.disconnect(connection)
            is_known = self._sessions.cut_off(peer.session, now_s)
            self.has_new_deadline = True
            self._lead.cut(connection, peer.session.name, now_s)
            if not is_known:
                self._lead.ended(peer.session.name)

    def tick(self, now_s: float) -> list[Action]:
        """Time has passed: answers requests that are over, hangs up on peers that did not prove anything."""
        journal = self._lead.journal
        actions: list[Action] = []
        for connection, reply in self.state.expire(now_s):
            session = self._connections[connection].session
            if journal is not None and session is not None and reply[0] in session.waiting:
                journal.note(Entry.TIMED_OUT, session.name, reply[0])
            actions.append(self._woken((connection, reply)))
        actions += self._hang_up_on_silent(now_s)
        for name in self._sessions.tick(now_s):
            self._lead.ended(name)
        return self._lead.tick(actions, now_s)

    @property
    def is_deposed(self) -> bool:
        """True if the standby may have taken over: nothing is to be answered any more."""
        return self._lead.is_deposed

    def close(self) -> None:
        """Nobody can connect any more."""
        self._lead.close()

    def take_over(self, replica: Replica, now_s: float) -> None:
        """The leader is gone: serve its clients when they come."""
        self.state, self._sessions = replica.take_over(now_s)
        self.limits = self.state.limits._replace(num_unproved=self.limits.num_unproved)
        self._votes = None
        self._lead.inherit(replica.term, replica.electors, now_s)
        self.has_new_deadline = True

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

    def _special(self, connection: int, session: Session, message: Message, now_s: float) -> bytes | None:
        """Handles a message that concerns the session; returns its reply, or b"", if that is all, None where the state
        must be asked."""
        request_id, op = message[:2]
        if type(request_id) is not int or type(op) is not int:
            return None
        if op < 0:
            message[1] = op = -op
            if op not in READING and (remembered := session.told(request_id)) is not None:
                return self._encode(remembered)
        if op == Op.LEAVE:
            self._lead.left(connection, now_s)
            self._sessions.end(session)
            self.disconnected(connection, now_s)
            return self._encode([request_id, int(Status.OK), None])
        if op == Op.CANCEL and len(message) == 3 and type(message[2]) is int and message[2] in session.waiting:
            session.waiting.discard(message[2])
            if self._lead.journal is not None:
                self._lead.journal.note(Entry.REQUEST, session.name, message)
        elif op == Op.ACK:
            return self._lead.acknowledge(connection, message, now_s)
        elif op in (Op.FOLLOW, Op.ELECT):
            self.has_new_deadline = True
            if op == Op.FOLLOW:
                return self._lead.follow(connection, message, now_s)
            return self._lead.elect(connection, session.name, message)
        return None

    def _woken(self, outgoing: tuple[int, Message]) -> Action:
        """The answer to a request that was parked."""
        connection, reply = outgoing
        session = self._connections[connection].session
        assert session is not None
        session.woken(reply)
        return connection, self._encode(reply), ""

    def _woken_together(self, replies: list[tuple[int, Message]]) -> list[Action]:
        """Answers to requests that were parked, one action for each connection: a proxy's has many."""
        frames: dict[int, list[bytes]] = {}
        for outgoing in replies:
            connection, frame, _ = self._woken(outgoing)
            frames.setdefault(connection, []).append(frame)
        return [(connection, b"".join(parts), "") for connection, parts in frames.items()]

    def _present(self, term: int) -> Iterator[Message]:
        return present_state(self.state, self._sessions, self._name_of, term)

    def _name_of(self, connection: int) -> bytes:
        session = self._connections[connection].session
        assert session is not None
        return session.name

    def _clients(self) -> list[int]:
        return [connection for connection, peer in self._connections.items() if peer.session is not None]

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
        verdict = handshake.verdict(answer, self.limits.frame_bytes, self._lead.standby)
        session = self._sessions.resume(handshake.session) if handshake.resumes else None
        if verdict[0] == Status.OK and self._votes is not None:
            if handshake.vote:
                self._votes[handshake.session] = (handshake.vote, now_s)
            verdict = [int(Status.STANDBY), "this is a standby, and has not taken over."]
        elif verdict[0] == Status.OK and handshake.resumes and session is None:
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
        welcome = (connection, self._encode(verdict), "")
        return actions + self._lead.after(self._lead.came(session.name, welcome), now_s)

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
    """True if the request may change something; None: it concerns the session, or is no operation."""
    try:
        return _CHANGES.get(message[1])
    except (IndexError, TypeError):
        return True
