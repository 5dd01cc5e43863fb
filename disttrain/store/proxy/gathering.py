"""Gathers adds to counters, and arrivals at one barrier, so that they go to the server as one request.

Of one counter or barrier a single request is on its way at a time; what comes meanwhile goes together once the server
has seen that (flat combining, SPAA 2010). So a lone request never waits, and the busier the server is, the more go
together. Adds to other counters that may go at the same time go with them. What a connection asks after it is gathered
does not overtake it.
"""

from __future__ import annotations

from typing import Any, Final

from disttrain.store.protocol.wire import Op
from disttrain.store.proxy.requests import TOGETHER_BYTES, Key, Request, Sent

_TYPES_OF_BARRIERS: Final = {(str, int, float), (str, int, int)}
# Python 3.11 takes several times as long to look up a member of an enum as to compare it.
_ADD, _BARRIER, _ADD_EACH, _BARRIER_EACH = map(int, (Op.ADD, Op.BARRIER, Op.ADD_EACH, Op.BARRIER_EACH))


def key_of(request: Request) -> Key | None:
    """The key of those with which a request may go together; None: it goes alone, as the server refuses other types."""
    message = request.message
    if request.op == _ADD:
        return (_ADD, message[2]) if type(message[2]) is str and type(message[3]) is int else None
    if request.op == _BARRIER and tuple(map(type, message[2:])) in _TYPES_OF_BARRIERS:
        return tuple(message[1:])
    return None


def body_of(requests: list[Request]) -> list[Any]:
    """The body of the one request for these."""
    first = requests[0].message
    if first[1] == _BARRIER:
        return [_BARRIER_EACH, *first[2:], len(requests)]
    if len(requests) == 1:
        return first[1:]
    keys, amounts = ([request.message[index] for request in requests] for index in (2, 3))
    return [_ADD_EACH, keys, amounts]


class Gathering:
    """Requests that are not sent yet, by key."""

    def __init__(self) -> None:
        self.ready: dict[Key, list[Request]] = {}
        """They may go."""
        self._held: dict[Key, list[Request]] = {}
        self._on_way: dict[Key, Sent] = {}
        self._key_of: dict[int, Key] = {}
        """Of what each connection has asked last."""

    def add(self, key: Key, request: Request, connection: int) -> None:
        """One more; nothing of its connection is gathered under another key."""
        self._key_of[connection] = key
        (self._held if key in self._on_way else self.ready).setdefault(key, []).append(request)

    def before(self, connection: int, key: Key | None) -> list[Request]:
        """Takes out what has to go before this connection's next request, of `key`."""
        gathered = self._key_of.get(connection)
        if gathered is None or gathered == key:
            return []
        del self._key_of[connection]
        return self.take(gathered)

    def take(self, key: Key) -> list[Request]:
        """Takes out what is gathered under `key`."""
        return self.ready.pop(key, None) or self._held.pop(key, [])

    def take_ready(self) -> list[Request]:
        """Takes out those that have been ready for the longest time; with adds all others, as far as there is room."""
        first = next(iter(self.ready))
        requests = self.ready.pop(first)
        if first[0] != _ADD:
            return requests
        room_bytes = TOGETHER_BYTES - len(first[1]) * len(requests)
        for key in [key for key in self.ready if key[0] == _ADD]:
            room_bytes -= len(key[1]) * len(self.ready[key])
            if room_bytes < 0:
                break
            requests += self.ready.pop(key)
        return requests

    def goes(self, sent: Sent) -> None:
        """This one is on its way: others of its keys wait."""
        sent.keys = {request.key for request in sent.requests if request.key is not None}
        self._on_way |= dict.fromkeys(sent.keys, sent)

    def seen(self, sent: Sent) -> None:
        """The server has seen it."""
        for key in sent.keys:
            if self._on_way.get(key) is sent:
                del self._on_way[key]
                if key in self._held:
                    self.ready[key] = self._held.pop(key)
