"""Gathers adds to one counter, and arrivals at one barrier, so that they go to the server as one request.

Of one counter or barrier a single request is on its way at a time; what comes meanwhile goes together once the server
has seen that (flat combining: Hendler, Incze, Shavit and Tzafrir, SPAA 2010). So a lone request never waits, and the
busier the server is, the more go together. What a connection asks after it is gathered does not overtake it.
"""

from __future__ import annotations

from typing import Any

from disttrain.store.protocol.wire import Op
from disttrain.store.proxy.requests import Key, Request, Sent


def key_of(request: Request) -> Key | None:
    """The key of those with which a request may go together; None: it goes alone."""
    match request.message[1:]:
        case [Op.ADD, str(name), amount] if type(amount) is int:
            return Op.ADD, name
        case [Op.BARRIER, str(name), num_members, timeout_s] if type(num_members) is int and num_members > 0:
            # The server would refuse another type of time, and one that is no number would have no equal.
            return (Op.BARRIER, name, num_members, timeout_s) if type(timeout_s) in (int, float) else None
    return None


def body_of(requests: list[Request]) -> list[Any]:
    """The body of the one request for these."""
    first = requests[0].message
    if first[1] == Op.BARRIER:
        return [int(Op.BARRIER_EACH), *first[2:], len(requests)]
    if len(requests) == 1:
        return first[1:]
    return [int(Op.ADD_EACH), first[2], [request.message[3] for request in requests]]


class Gathering:
    """Requests that are not sent yet, by key."""

    def __init__(self) -> None:
        self._ready: dict[Key, list[Request]] = {}
        self._held: dict[Key, list[Request]] = {}
        self._on_way: dict[Key, Sent] = {}
        self._key_of: dict[int, Key] = {}
        """Of what each connection has asked last."""

    @property
    def has_ready(self) -> bool:
        """True while something may go."""
        return bool(self._ready)

    def add(self, key: Key, request: Request, connection: int) -> None:
        """One more; nothing of its connection is gathered under another key."""
        self._key_of[connection] = key
        (self._held if key in self._on_way else self._ready).setdefault(key, []).append(request)

    def before(self, connection: int, key: Key | None) -> list[Request]:
        """Takes out what has to go before this connection's next request, of `key`."""
        gathered = self._key_of.get(connection)
        if gathered is None or gathered == key:
            return []
        del self._key_of[connection]
        return self.take(gathered)

    def take(self, key: Key) -> list[Request]:
        """Takes out what is gathered under `key`."""
        return self._ready.pop(key, None) or self._held.pop(key, [])

    def take_ready(self) -> list[Request]:
        """Takes out those that have been ready for the longest time."""
        return self._ready.pop(next(iter(self._ready)))

    def goes(self, key: Key, sent: Sent) -> None:
        """This one is on its way: others of its key wait."""
        sent.key = key
        self._on_way[key] = sent

    def seen(self, sent: Sent) -> None:
        """The server has seen it."""
        if sent.key is not None and self._on_way.get(sent.key) is sent:
            del self._on_way[sent.key]
            if sent.key in self._held:
                self._ready[sent.key] = self._held.pop(sent.key)
