"""Requests under way at a proxy: those of clients, and those to the server that stand for them."""

from __future__ import annotations

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

Key = tuple[Any, ...]
"""Of requests that go together."""


class Request:
    """A client's request under way; `connection` None: its client is cut off, and `session` keeps the answer."""

    __slots__ = ("connection", "message", "op", "request_id", "sent", "session")

    def __init__(self, connection: int, message: Message) -> None:
        self.connection: int | None = connection
        self.message = message
        self.request_id: int = message[0]
        self.op: int = message[1]
        self.session: Session | None = None
        self.sent: Sent | None = None
        """None: it is gathered still."""


class Sent:
    """A request to the server, for one or more of clients; `was_sent` on whatever link."""

    __slots__ = ("body", "cancel", "cancelled", "is_change", "is_prompt", "key", "number", "requests", "was_sent")

    def __init__(self, number: int, body: list[Any], requests: list[Request]) -> None:
        self.number = number
        self.body = body
        self.requests = requests
        self.key: Key | None = None
        self.cancelled: Sent | None = None
        """The request that this one cancels."""
        self.cancel: Sent | None = None
        """The request that cancels this one."""
        self.was_sent = False
        self.is_change = body[0] in _CHANGING
        """It changes something at once."""
        self.is_prompt = body[0] not in _LONG
        """The server mostly answers at once."""
        for request in requests:
            request.sent = self
