"""What each client was told last, in case that it did not hear: so a request that is repeated is applied once.

A client whose connection breaks comes back with its session's name and repeats what it got no answer to. Answers
arrive in the order in which they were sent, so those that it missed are the last ones, at most one for each of its
threads. What only reads is not remembered but done again; who still waits when the connection breaks has been told
nothing and waits anew.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from disttrain.store.wire import Message, Status

SESSION_S: Final = 60.0
"""How long a client that was cut off may take to come back."""

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
        """When it is forgotten, if it is cut off."""
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
    """All sessions, and until when those wait that were cut off."""

    def __init__(self) -> None:
        self._of: dict[bytes, Session] = {}
        self._cut_off: deque[Session] = deque()

    @property
    def next_deadline_s(self) -> float | None:
        """When `tick` wants to be called."""
        return self._cut_off[0].expires_s if self._cut_off else None

    def begin(self, name: bytes, connection: int) -> Session:
        """A new client."""
        session = self._of[name] = Session(name, connection)
        return session

    def resume(self, name: bytes) -> Session | None:
        """The session of a client that comes back, if it is known."""
        return self._of.get(name)

    def cut_off(self, session: Session, now_s: float) -> None:
        """Its connection has ended; perhaps the client comes back."""
        session.connection = None
        session.waiting.clear()
        session.expires_s = now_s + SESSION_S
        if session.name in self._of:
            self._cut_off.append(session)

    def end(self, session: Session) -> None:
        """The client has said that it does not come back."""
        self._of.pop(session.name, None)

    def tick(self, now_s: float) -> None:
        """Forget who has not come back in time."""
        while self._cut_off:
            session = self._cut_off[0]
            if session.connection is None and session.expires_s > now_s:
                return
            # One that came back, and was cut off again, stands further behind as well.
            self._cut_off.popleft()
            if session.connection is None:
                self.end(session)
