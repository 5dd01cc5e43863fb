"""Requests under way at a proxy: those of clients, and those to the server that stand for them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from disttrain.store.protocol.sessions import Session
from disttrain.store.protocol.wire import READING, Message, Op

WAITING: Final = frozenset(
    (Op.GET, Op.WAIT, Op.MULTI_GET, Op.WATCH, Op.BARRIER, Op.BARRIER_EACH, Op.QUEUE_PUSH, Op.QUEUE_POP),
)
"""Operations that may have to wait at the server, and so be cancelled there."""
_LONG: Final = WAITING - {Op.GET, Op.MULTI_GET}
"""Operations that mostly wait; of these the others do not wait for answers."""
MERGEABLE: Final = READING | {Op.SET, Op.COMPARE_SET}
"""Operations whose second of two equal ones changes nothing, and has the result of the first."""

_CHANGING: Final = frozenset(Op) - READING - WAITING
# Python 3.11 takes several times as long to look up a member of an enum as to compare it.
_SET, _MULTI_SET, _ADD_EACH = map(int, (Op.SET, Op.MULTI_SET, Op.ADD_EACH))
TOGETHER_BYTES: Final = 4096
"""Of the `set`s that go as one, and of the keys of adds; that a large one fails costs nobody else anything."""

Key = tuple[Any, ...]
"""Of requests that go together."""


class Request:
    """A client's request under way; `connection` None: its client is cut off, and `session` keeps the answer."""

    __slots__ = ("connection", "key", "message", "op", "request_id", "sent", "session")

    def __init__(self, connection: int, message: Message) -> None:
        self.connection: int | None = connection
        self.message = message
        self.request_id: int = message[0]
        self.op: int = message[1]
        self.session: Session | None = None
        self.key: Key | None = None
        """It may go with others of this key."""
        self.sent: Sent | None = None
        """None: it is gathered still."""


class Sent:
    """A request to the server, for one or more of clients; `was_sent` on whatever link."""

    __slots__ = (
        "body", "cancel", "cancelled", "is_change", "is_prompt", "keys", "number", "requests", "room_bytes", "was_sent"
    )  # fmt: skip

    def __init__(self, number: int, body: list[Any], requests: list[Request]) -> None:
        self.number = number
        self.body = body
        self.requests = requests
        self.keys: Collection[Key] = ()
        """Of those that were gathered."""
        self.cancelled: Sent | None = None
        """The request that this one cancels."""
        self.cancel: Sent | None = None
        """The request that cancels this one."""
        self.was_sent = False
        self.is_change = body[0] in _CHANGING
        """It changes something at once."""
        self.is_prompt = body[0] not in _LONG
        """The server mostly answers at once."""
        self.room_bytes = TOGETHER_BYTES if _is_set(body) else 0
        """What other `set`s that go with this one may have."""
        for request in requests:
            request.sent = self

    @property
    def is_of_keys(self) -> bool:
        """It changes the keys of several requests, each of which may be too large."""
        return self.body[0] in (_MULTI_SET, _ADD_EACH) and len(self.requests) > 1

    def takes(self, request: Request, num_bytes: int) -> bool:
        """True where `request`, of so many bytes, is a `set` for which there is room: it goes with this one."""
        if num_bytes > self.room_bytes or not _is_set(request.message[1:]):
            return False
        self.room_bytes -= num_bytes
        _, key, value = request.message[1:]
        if self.body[0] == _SET:
            self.body = [_MULTI_SET, [self.body[1]], [self.body[2]]]
        self.body[1].append(key)
        self.body[2].append(value)
        self.requests.append(request)
        request.sent = self
        return True


def _is_set(body: list[Any]) -> bool:
    """True for a `set` that the server refuses for its limits only."""
    return body[0] == _SET and type(body[1]) is str and type(body[2]) is bytes
