"""Passes requests of many clients on to a server, over one session, and its answers back. No sockets, clock, threads.

For a hub it stands where `StoreState` stands otherwise; all requests are parked until the server has answered. The
order of requests stays what it was, so that the results are those of the same requests in that order at the server.
Equal requests whose result is the same for all, and that follow each other without another change between them, go as
one; so do `set`s that follow each other, adds to one counter, and arrivals at one barrier (see `gathering`).

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
from disttrain.store.protocol.wire import COUNTED, READING, Encoder, Message, Op, Status
from disttrain.store.proxy.gathering import Gathering, body_of, key_of
from disttrain.store.proxy.requests import MERGEABLE, WAITING, Key, Request, Sent

_NUM_ARGUMENTS: Final = {
    Op.SET: 2, Op.GET: 2, Op.ADD: 2, Op.APPEND: 2, Op.COMPARE_SET: 3, Op.CHECK: 1, Op.WAIT: 2, Op.DELETE_KEY: 1,
    Op.NUM_KEYS: 0, Op.MULTI_GET: 2, Op.MULTI_SET: 2, Op.BARRIER: 3, Op.LIST_KEYS: 1, Op.QUEUE_PUSH: 4,
    Op.QUEUE_POP: 2, Op.QUEUE_LEN: 1, Op.WATCH: 3, Op.ADD_EACH: 2, Op.BARRIER_EACH: 4,
}  # fmt: skip


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
        self._under_way: dict[int, dict[int, Request]] = {}
        self._orphans: dict[tuple[bytes, int], Request] = {}
        self._sent: dict[int, Sent] = {}
        self._unsent: deque[Sent] = deque()
        self._gathering = Gathering()
        self._num_changing = 0
        self._num_prompt = 0
        self._mergeable: dict[bytes, Sent] = {}
        self._refused: list[Outgoing] = []

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
        """True while something may be sent."""
        return bool(self._unsent or self._gathering.ready) and self._num_changing < self.most_changing

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
        if not is_request or _NUM_ARGUMENTS.get(request[1]) != len(request) - 2:
            if is_request and request[1] == Op.CANCEL and len(request) == 3:
                return self._cancel(connection, request)
            return self._refusing.handle(connection, request, now_s)
        if self._orphans:
            orphan = self._orphans.pop((self._session_of(connection).name, request[0]), None)
            if orphan is not None:
                orphan.connection = connection
                self._under_way.setdefault(connection, {})[orphan.request_id] = orphan
                return []
        under_way = Request(connection, request)
        self._under_way.setdefault(connection, {})[under_way.request_id] = under_way
        self._send(under_way)
        return []

    def cut(self, connection: int, session: Session) -> None:
        """The client on `connection` is cut off; perhaps it comes back."""
        self._send_gathered(connection, None)
        for request in self._under_way.pop(connection, {}).values():
            request.connection = None
            if request.op not in READING:
                request.session = session
                self._orphans[session.name, request.request_id] = request
            if request.op in WAITING:
                self._give_up(request)

    def disconnect(self, connection: int) -> None:
        """See `StoreState.disconnect`: `cut` was called before."""
        assert connection not in self._under_way

    def forget(self, session: bytes) -> None:
        """That client does not come back."""
        for key in [key for key in self._orphans if key[0] == session]:
            self._orphans.pop(key).session = None

    def frames(self) -> list[bytes]:
        """The bytes to be sent to the server since this was called last."""
        self._mergeable.clear()
        frames = []
        while self.has_unsent:
            if not self._unsent:
                self._together(self._gathering.take_ready())
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
        """The bytes to be sent first on a new connection: requests without an answer yet, under their old numbers."""
        under_way = [sent for sent in self._sent.values() if sent.was_sent]
        return [self._encode([sent.number, -sent.body[0], *sent.body[1:]]) for sent in under_way]

    def answered(self, message: Message) -> list[Outgoing]:
        """The server's answer to one request: the replies to those of clients."""
        number, status, value = message
        if number == COUNTED:
            return self._counted(self._sent.get(value))
        sent = self._sent.get(number)
        return [] if sent is None else self._answer(sent, status, value)

    def _send(self, request: Request) -> None:
        body = request.message[1:]
        key = request.key = key_of(request)
        assert request.connection is not None
        self._send_gathered(request.connection, key)
        if key is not None:
            self._gathering.add(key, request, request.connection)
        elif request.op in MERGEABLE:
            equal = self._encode(body)
            sent = self._mergeable.get(equal)
            if sent is None:
                self._mergeable[equal] = self._with_last(request, len(equal)) or self._new(body, [request])
            else:
                sent.requests.append(request)
                request.sent = sent
        else:
            self._new(body, [request])

    def _send_gathered(self, connection: int, key: Key | None) -> None:
        """Sends what this connection has asked before its next request, of `key`, unless they go together."""
        if behind := self._gathering.before(connection, key):
            self._together(behind)

    def _together(self, requests: list[Request]) -> Sent:
        """Those that were gathered go as one."""
        sent = self._new(body_of(requests), requests)
        self._gathering.goes(sent)
        return sent

    def _with_last(self, request: Request, num_bytes: int) -> Sent | None:
        """What is to be sent last so far, if this one goes with it."""
        if not self._unsent or not self._unsent[-1].takes(request, num_bytes):
            return None
        self._mergeable.clear()
        return self._unsent[-1]

    def _new(self, body: list[Any], requests: list[Request]) -> Sent:
        if body[0] not in READING:
            # What follows may read what this changes.
            self._mergeable.clear()
        self._number += 1
        sent = self._sent[self._number] = Sent(self._number, body, requests)
        self._unsent.append(sent)
        return sent

    def _cancel(self, connection: int, request: Message) -> list[Outgoing]:
        """A client waits for one of its requests no longer."""
        target = self._under_way.get(connection, {}).get(request[2]) if type(request[2]) is int else None
        if target is None:
            return [(connection, [request[0], int(Status.OK), False])]
        del self._under_way[connection][target.request_id]
        target.connection = None
        if target.op not in WAITING:
            # It cannot be undone; nobody hears the answer.
            return [(connection, [request[0], int(Status.OK), False])]
        canceller = Request(connection, request)
        if self._give_up(target, canceller):
            self._under_way[connection][canceller.request_id] = canceller
            return []
        return [(connection, [request[0], int(Status.OK), True])]

    def _give_up(self, request: Request, canceller: Request | None = None) -> bool:
        """Nobody waits for `request` any more. True where the server has to be told."""
        cancellers = [] if canceller is None else [canceller]
        sent = request.sent
        if sent is None:
            assert request.key is not None
            sent = self._together(self._gathering.take(request.key))
        if sent.cancel is not None:
            sent.cancel.requests += cancellers
            return True
        # Of those at a barrier the others come to it anew: each of them counts there.
        if request.op != Op.BARRIER and any(other.connection is not None for other in sent.requests):
            return False
        self._mergeable.clear()
        sent.cancel = self._new([int(Op.CANCEL), sent.number], cancellers)
        sent.cancel.cancelled = sent
        return True

    def _counted(self, sent: Sent | None) -> list[Outgoing]:
        """The server has counted who comes to a barrier."""
        if sent is None:
            return []
        self._gathering.seen(sent)
        # Those of another proxy, which waits for this word, too.
        others = [request for request in sent.requests if request.op == Op.BARRIER_EACH]
        counted = [COUNTED, int(Status.OK)]
        return [(each.connection, [*counted, each.request_id]) for each in others if each.connection is not None]

    def _answer(self, sent: Sent, status: int, value: Any) -> list[Outgoing]:
        self._over(sent)
        if sent.cancelled is not None and value is True:
            self._forgotten(sent.cancelled)
        if (status == Status.APART and sent.keys) or (status == Status.LIMIT and sent.is_of_keys):
            self._apart(sent)
            return []
        is_each = sent.keys and not status and sent.body[0] == Op.ADD_EACH
        values = value if is_each else [value] * len(sent.requests)
        replies = []
        for request, result in zip(sent.requests, values, strict=True):
            reply = [request.request_id, status, result]
            if request.connection is not None:
                self._under_way[request.connection].pop(request.request_id, None)
                replies.append((request.connection, reply))
            elif request.session is not None:
                self._orphans.pop((request.session.name, request.request_id), None)
                request.session.keep(reply)
        return replies

    def _over(self, sent: Sent) -> None:
        """The server has to do with it no more."""
        del self._sent[sent.number]
        self._gathering.seen(sent)
        if sent.was_sent:
            self._num_prompt -= sent.is_prompt
            self._num_changing -= sent.is_change

    def _forgotten(self, sent: Sent) -> None:
        """The server waits no longer for the sake of these, and has done nothing."""
        if self._sent.get(sent.number) is not sent:
            return
        self._over(sent)
        for request in sent.requests:
            if request.connection is not None:  # it waits on, or its client has come back meanwhile
                self._send(request)
            elif request.session is not None:
                self._orphans.pop((request.session.name, request.request_id), None)

    def _apart(self, sent: Sent) -> None:
        """The server has done nothing for these together: each is asked on its own, but who waits no longer."""
        for request in sent.requests:
            if request.connection is not None or request.op not in WAITING:
                self._new(request.message[1:], [request])
            elif request.session is not None:
                self._orphans.pop((request.session.name, request.request_id), None)
