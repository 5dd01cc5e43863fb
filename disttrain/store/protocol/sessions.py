"""Keeps each client's last replies, in case they were lost, so that a repeated request is applied once.

A client whose connection breaks comes back with its session's name and repeats the requests without a reply. Replies
arrive in the order in which they were sent, so the lost ones are the last ones, at most one for each of its threads.
Requests that only read are not remembered but done again. A request that still waits when the connection breaks has had
no reply, and is parked again.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Final

from disttrain.store.protocol.wire import Message, Status

SESSION_S: Final = 60.0
"""The time that a client that was cut off has to come back."""

ASLEEP_S: Final = 24 * 3600.0
"""The same for one whose server is gone, and another has taken its place: who asks nothing meanwhile, as a rank that
trains, does not notice."""

MAX_REPLIES: Final = 128
"""Of one session; when there are more, the older half is forgotten."""

MAX_REPLY_BYTES: Final = 1 << 20
"""Of one session; the last reply is kept whatever its size."""

_FORGOTTEN: Final = "the connection broke, and the server does not know any more whether it had done this."


class Session:
    """One client, over all of its connections; `connection` None: it is cut off."""

    __slots__ = ("_forgotten_id", "_num_bytes", "_replies", "connection", "expires_s", "name", "waiting")

    def __init__(self, name: bytes, connection: int) -> None:
        self.name = name
        self.connection: int | None = connection
        self.waiting: set[int] = set()
        """Its parked requests whose answers must be kept."""
        self.expires_s = 0.0
        """The time at which it is forgotten, if it is cut off."""
        self._replies: deque[Message] | None = None
        self._num_bytes = 0
        self._forgotten_id = -1

    def keep(self, reply: Message) -> None:
        """Remember what the client is about to be told."""
        replies = self._replies
        if replies is None:
            replies = self._replies = deque()
        replies.append(reply)
        if type(reply[2]) is bytes:
            self._num_bytes += len(reply[2])
        if len(replies) > MAX_REPLIES or self._num_bytes > MAX_REPLY_BYTES:
            self._forget()

    def woken(self, reply: Message) -> None:
        """A request that was parked is answered: remember it if it changed something."""
        if reply[0] in self.waiting:
            self.waiting.discard(reply[0])
            self.keep(reply)

    def cut(self) -> None:
        """Notes that its connection has ended."""
        self.connection = None
        self.waiting.clear()

    def memory(self) -> tuple[int, list[Message]]:
        """The arguments for `remember` to make the same session: up to which request its replies are forgotten, and the
        others."""
        return self._forgotten_id, list(self._replies or ())

    def remember(self, forgotten_id: int, replies: list[Message]) -> None:
        """See `memory`."""
        self._forgotten_id = forgotten_id
        for reply in replies:
            self.keep(reply)

    def told(self, request_id: int) -> Message | None:
        """The reply to a repeated request; None when there was none."""
        for reply in self._replies or ():
            if reply[0] == request_id:
                return reply
        return [request_id, int(Status.REFUSED), _FORGOTTEN] if request_id <= self._forgotten_id else None

    def _forget(self) -> None:
        assert self._replies is not None
        max_replies = MAX_REPLIES // 2 if len(self._replies) > MAX_REPLIES else MAX_REPLIES
        while len(self._replies) > max_replies or (self._num_bytes > MAX_REPLY_BYTES and len(self._replies) > 1):
            request_id, _, value = self._replies.popleft()
            self._forgotten_id = max(self._forgotten_id, request_id)
            if type(value) is bytes:
                self._num_bytes -= len(value)


class Sessions:
    """Sessions of clients, and the time until which those wait that were cut off."""

    def __init__(self) -> None:
        self._of: dict[bytes, Session] = {}
        self._cut_off: list[tuple[float, int, Session]] = []
        """A heap, by when they are to be looked at."""
        self._sequence = itertools.count()

    @property
    def next_deadline_s(self) -> float | None:
        """The next time to call `tick`."""
        return self._cut_off[0][0] if self._cut_off else None

    def begin(self, name: bytes, connection: int) -> Session:
        """A new client."""
        session = self._of[name] = Session(name, connection)
        return session

    def resume(self, name: bytes) -> Session | None:
        """The session of a client that comes back, if it is known."""
        return self._of.get(name)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._of.values())

    def cut_off(self, session: Session, now_s: float, away_s: float = SESSION_S) -> bool:
        """Notes that a session's connection has ended; perhaps the client comes back. False: it does not, it has ended
        before."""
        session.cut()
        session.expires_s = now_s + away_s
        is_known = session.name in self._of
        if is_known:
            heapq.heappush(self._cut_off, (session.expires_s, next(self._sequence), session))
        return is_known

    def end(self, session: Session) -> None:
        """The client has said that it does not come back."""
        self._of.pop(session.name, None)

    def tick(self, now_s: float) -> list[bytes]:
        """Forget who has not come back in time; the names of their sessions."""
        forgotten = []
        while self._cut_off and self._cut_off[0][0] <= now_s:
            session = heapq.heappop(self._cut_off)[2]
            # One that came back, and was cut off again, stands further behind as well.
            if session.connection is None and session.expires_s <= now_s:
                self.end(session)
                forgotten.append(session.name)
        return forgotten
