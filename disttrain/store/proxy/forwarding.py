"""Passes requests of many clients on to a server, over one session, and its answers back. No sockets, clock, threads.

For a hub it stands where `StoreState` stands otherwise; all requests are parked until the server has answered. The
order of requests stays what it was, so that the results are those of the same requests in that order at the server.
Equal requests that read, and follow each other without a change between them, go as one.

A client that is cut off may come back and repeat a request: what is under way and changes something is kept for it,
unless the server says that it had to wait and is forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from disttrain.store.protocol.limits import Limits
from disttrain.store.protocol.sessions import MAX_REPLIES, Session
from disttrain.store.protocol.state import Outgoing, StoreState
from disttrain.store.protocol.wire import READING, Encoder, Message, Op, Status

_WAITING: Final = frozenset(
    (Op.GET, Op.WAIT, Op.MULTI_GET, Op.WATCH, Op.BARRIER, Op.QUEUE_PUSH, Op.QUEUE_POP),
)
"""Operations that may have to wait at the server, and so be cancelled there."""
_LONG: Final = frozenset((Op.WAIT, Op.WATCH, Op.BARRIER, Op.QUEUE_PUSH, Op.QUEUE_POP))
"""Operations that mostly wait; of these the others do not wait for answers."""
_NUM_ARGUMENTS: Final = {
    Op.SET: 2, Op.GET: 2, Op.ADD: 2, Op.APPEND: 2, Op.COMPARE_SET: 3, Op.CHECK: 1, Op.WAIT: 2, Op.DELETE_KEY: 1,
    Op.NUM_KEYS: 0, Op.MULTI_GET: 2, Op.MULTI_SET: 2, Op.BARRIER: 3, Op.LIST_KEYS: 1, Op.QUEUE_PUSH: 4,
    Op.QUEUE_POP: 2, Op.QUEUE_LEN: 1, Op.WATCH: 3,
}  # fmt: skip


class _Request:
    """A client's request under way; `connection` None: its client is cut off, and `session` keeps the answer."""

    __slots__ = ("connection", "message", "op", "request_id", "sent", "session")

    def __init__(self, connection: int, message: Message) -> None:
        self.connection: int | None = connection
        self.message = message
        self.request_id: int = message[0]
        self.op: int = message[1]
        self.session: Session | None = None
        self.sent: _Sent | None = None


class _Sent:
    """A request to the server, for one or more of clients; `was_sent` on whatever link."""

    __slots__ = ("body", "cancelled", "number", "requests", "was_sent")

    def __init__(self, number: int, body: list[Any], requests: list[_Request], cancelled: _Sent | None = None) -> None:
        self.number = number
        self.body = body
        self.requests = requests
        self.cancelled = cancelled
        self.was_sent = False

    @property
    def is_change(self) -> bool:
        """True for what changes something at once."""
        return self.body[0] not in READING and self.body[0] not in _WAITING

    @property
    def is_prompt(self) -> bool:
        """True for what the server mostly answers at once."""
        return self.body[0] not in _LONG


class Forwarding:
    """Requests under way; see `StoreState` for the methods that a hub calls.

    Args: session_of  the session of a connection.
    """

    def __init__(self, limits: Limits, session_of: Callable[[int], Session]) -> None:
        self.limits = limits
        self.frame_bytes = limits.frame_bytes
        """Of the server: a larger request would cost all clients their connection."""
        self.most_changing = MAX_REPLIES // 2
        """Requests without an answer that change something: the server keeps as many replies for this proxy."""
        self._session_of = session_of
        self._refusing = StoreState(limits)
        self._encode = Encoder().encode
        self._number = 0
        self._under_way: dict[int, dict[int, _Request]] = {}
        self._orphans: dict[tuple[bytes, int], _Request] = {}
        self._sent: dict[int, _Sent] = {}
        self._unsent: deque[_Sent] = deque()
        self._num_changing = 0
        self._num_prompt = 0
        self._mergeable: dict[bytes, _Sent] = {}
        self._refused: list[Outgoing] = []
        self.wake: Callable[[], object] = lambda: None
        """Called when there is something to send, and was nothing before."""

    @property
    def num_parked(self) -> int:
        """The number of requests under way."""
        return sum(map(len, self._under_way.values()))

    @property
    def next_deadline_s(self) -> float | None:
        """The server looks after deadlines."""
        return None

    @property
    def has_unsent(self) -> bool:
        """True while something is to be sent."""
        return bool(self._unsent)

    @property
    def awaits_answers(self) -> bool:
        """True while the server is about to answer, so that what comes meanwhile may go together."""
        return self._num_prompt > 0

    def waits(self, connection: int, request_id: object) -> bool:
        """See `StoreState.waits`."""
        waits = self._under_way.get(connection)
        return waits is not None and request_id in waits

    def expire(self, now_s: float) -> list[Outgoing]:
        """See `next_deadline_s`."""
        return []

    def handle(self, connection: int, request: Message, now_s: float) -> list[Outgoing]:
        """Take a request to be sent on; the reply, where it makes no sense."""
        is_request = len(request) >= 2 and type(request[0]) is int and type(request[1]) is int and request[0] >= 0
        if is_request and request[1] == Op.CANCEL and len(request) == 3:
            return self._cancel(connection, request)
        if not is_request or _NUM_ARGUMENTS.get(request[1]) != len(request) - 2:
            return self._refusing.handle(connection, request, now_s)
        if self._orphans:
            orphan = self._orphans.pop((self._session_of(connection).name, request[0]), None)
            if orphan is not None:
                orphan.connection = connection
                self._under_way.setdefault(connection, {})[orphan.request_id] = orphan
                return []
        under_way = _Request(connection, request)
        self._under_way.setdefault(connection, {})[under_way.request_id] = under_way
        self._send(under_way)
        return []

    def cut(self, connection: int, session: Session) -> None:
        """The client on `connection` is cut off; perhaps it comes back."""
        for request in self._under_way.pop(connection, {}).values():
            request.connection = None
            if request.op not in READING:
                request.session = session
                self._orphans[session.name, request.request_id] = request
            if request.op in _WAITING:
                self._give_up(request)

    def disconnect(self, connection: int) -> None:
        """See `StoreState.disconnect`: `cut` was called before."""
        assert connection not in self._under_way

    def forget(self, session: bytes) -> None:
        """That client does not come back."""
        for key in [key for key in self._orphans if key[0] == session]:
            self._orphans.pop(key).session = None

    def frames(self) -> list[bytes]:
        """What is to be sent to the server since this was called last."""
        self._mergeable.clear()
        frames = []
        while self._unsent and self._num_changing < self.most_changing:
            sent = self._unsent.popleft()
            frame = self._encode([sent.number, *sent.body])
            if len(frame) > self.frame_bytes:
                text = f"the request has {len(frame)} bytes; the server takes {self.frame_bytes}."
                self._refused += self._answer(sent, int(Status.LIMIT), text)
                continue
            sent.was_sent = True
            self._num_changing += sent.is_change
            self._num_prompt += sent.is_prompt
            frames.append(frame)
        return frames

    def refused(self) -> list[Outgoing]:
        """Replies to what `frames` could not send."""
        refused, self._refused = self._refused, []
        return refused

    def frames_again(self) -> list[bytes]:
        """What is to be sent on a new connection before all else: what has no answer yet, under its old number."""
        under_way = [sent for sent in self._sent.values() if sent.was_sent]
        return [self._encode([sent.number, -sent.body[0], *sent.body[1:]]) for sent in under_way]

    def answered(self, message: Message) -> list[Outgoing]:
        """The server's answer to one request: the replies to those of clients."""
        number, status, value = message
        sent = self._sent.get(number)
        return [] if sent is None else self._answer(sent, status, value)

    def _send(self, request: _Request) -> None:
        body = request.message[1:]
        if request.op in READING:
            key = self._encode(body)
            sent = self._mergeable.get(key)
            if sent is not None:
                sent.requests.append(request)
                request.sent = sent
                return
            self._mergeable[key] = request.sent = self._new(body, [request])
        else:
            # What follows may read what this changes.
            self._mergeable.clear()
            request.sent = self._new(body, [request])

    def _new(self, body: list[Any], requests: list[_Request], cancelled: _Sent | None = None) -> _Sent:
        self._number += 1
        sent = self._sent[self._number] = _Sent(self._number, body, requests, cancelled)
        self._unsent.append(sent)
        if len(self._unsent) == 1:
            self.wake()
        return sent

    def _cancel(self, connection: int, request: Message) -> list[Outgoing]:
        """A client waits for one of its requests no longer."""
        target = self._under_way.get(connection, {}).get(request[2]) if type(request[2]) is int else None
        if target is None:
            return [(connection, [request[0], int(Status.OK), False])]
        if target.op not in _WAITING:
            # It cannot be undone; nobody hears the answer.
            del self._under_way[connection][target.request_id]
            target.connection = None
            return [(connection, [request[0], int(Status.OK), False])]
        del self._under_way[connection][target.request_id]
        target.connection = None
        canceller = _Request(connection, request)
        if self._give_up(target, canceller):
            self._under_way[connection][canceller.request_id] = canceller
            return []
        return [(connection, [request[0], int(Status.OK), True])]

    def _give_up(self, request: _Request, canceller: _Request | None = None) -> bool:
        """Nobody waits for `request` any more. True where the server has to be told."""
        sent = request.sent
        assert sent is not None
        if any(other.connection is not None for other in sent.requests):
            return False
        self._mergeable.clear()
        self._new([int(Op.CANCEL), sent.number], [] if canceller is None else [canceller], sent)
        return True

    def _answer(self, sent: _Sent, status: int, value: Any) -> list[Outgoing]:
        del self._sent[sent.number]
        self._num_prompt -= sent.was_sent and sent.is_prompt
        if sent.was_sent and sent.is_change:
            self._num_changing -= 1
            if self._num_changing == self.most_changing - 1 and self._unsent:
                self.wake()
        if sent.cancelled is not None and value is True:
            self._forgotten(sent.cancelled)
        replies = []
        for request in sent.requests:
            reply = [request.request_id, status, value]
            if request.connection is not None:
                self._under_way[request.connection].pop(request.request_id, None)
                replies.append((request.connection, reply))
            elif request.session is not None:
                self._orphans.pop((request.session.name, request.request_id), None)
                request.session.keep(reply)
        return replies

    def _forgotten(self, sent: _Sent) -> None:
        """The server waits no longer for the sake of these, and has done nothing."""
        if self._sent.pop(sent.number, None) is not None:
            self._num_prompt -= sent.was_sent and sent.is_prompt
        for request in sent.requests:
            if request.connection is not None:  # its client has come back meanwhile
                self._send(request)
            elif request.session is not None:
                self._orphans.pop((request.session.name, request.request_id), None)
