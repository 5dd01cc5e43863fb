"""Requests that wait, by name, by connection and by deadline.

A request is parked under one or more names of a table (keys, a barrier, a queue), with its connection, and in a heap of
deadlines. The heap forgets requests that were answered later (lazy deletion).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Any, Final

from disttrain.store.protocol.wire import Op

_HEAP_SLACK: Final = 64


class Parked:
    """A request that waits under `names` in `table`; `argument` is what `op` waits with."""

    __slots__ = ("argument", "connection", "live", "names", "op", "request_id", "table", "timeout_s")

    def __init__(self, op: Op, table: Table, names: set[str], timeout_s: float, argument: Any = None) -> None:
        self.op = op
        self.table = table
        self.names = names
        self.timeout_s = timeout_s
        self.argument = argument
        self.connection = -1
        self.request_id = -1
        self.live = True

    @property
    def name(self) -> str:
        """The only name."""
        return next(iter(self.names))

    def stand_under(self, name: str) -> None:
        """Wait under one more name, behind whoever waits there already."""
        self.names.add(name)
        self.table.setdefault(name, {})[self] = None


Table = dict[str, dict[Parked, None]]
"""The requests that wait under each name, in the order in which they came."""


class Parking:
    """Requests that wait, by connection and by deadline."""

    def __init__(self) -> None:
        self.num_parked = 0
        self._of: dict[int, dict[int, Parked]] = {}
        self._deadlines: list[tuple[float, int, Parked]] = []
        self._sequence = itertools.count()
        self._num_more: dict[str, int] = {}

    @property
    def next_deadline_s(self) -> float | None:
        """The first deadline; it may be that of a request that has left."""
        return self._deadlines[0][0] if self._deadlines else None

    def park(self, parked: Parked, connection: int, request_id: int, now_s: float) -> None:
        """Let the request wait, from now on, under its names. Its connection waits for no other with this id."""
        parked.connection = connection
        parked.request_id = request_id
        self._of.setdefault(connection, {})[request_id] = parked
        self.num_parked += 1
        for name in parked.names:
            parked.stand_under(name)
        if parked.op is Op.BARRIER and parked.argument[1] > 1:
            self._num_more[parked.name] = self._num_more.get(parked.name, 0) + parked.argument[1] - 1
        heapq.heappush(self._deadlines, (now_s + parked.timeout_s, next(self._sequence), parked))
        if len(self._deadlines) > 2 * self.num_parked + _HEAP_SLACK:
            self._deadlines = [entry for entry in self._deadlines if entry[2].live]
            heapq.heapify(self._deadlines)

    def leave(self, parked: Parked) -> None:
        """The request waits no longer."""
        parked.live = False
        self.num_parked -= 1
        if parked.op is Op.BARRIER and parked.argument[1] > 1:
            self._num_more[parked.name] -= parked.argument[1] - 1
            if not self._num_more[parked.name]:
                del self._num_more[parked.name]
        _discard(self._of, parked.connection, parked.request_id)
        for name in parked.names:
            _discard(parked.table, name, parked)

    def num_at(self, name: str, barriers: Table) -> int:
        """The number of members that wait at a barrier; one request may be for several."""
        return len(barriers.get(name, ())) + self._num_more.get(name, 0)

    def of(self, connection: int) -> list[Parked]:
        """The requests of `connection` that wait."""
        return list(self._of.get(connection, {}).values())

    def find(self, connection: int, request_id: object) -> Parked | None:
        """The request of `connection` that waits by this id."""
        waits = self._of.get(connection)
        return None if waits is None or type(request_id) is not int else waits.get(request_id)

    def expired(self, now_s: float) -> Iterator[Parked]:
        """Yields requests whose deadline has come; each must leave before the next is asked for."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            parked = heapq.heappop(self._deadlines)[2]
            if parked.live:
                yield parked


def _discard(table: dict[Any, Any], name: object, entry: object) -> None:
    """Take `entry` out of `table[name]`, and that row out of the table when it was the last."""
    row = table[name]
    del row[entry]
    if not row:
        del table[name]
