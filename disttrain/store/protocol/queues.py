"""Queues: values come out in the order in which they went in, each to one client.

A value goes directly to the client that has waited longest. A push may name a capacity: it waits while the queue holds
as many values. A queue exists as long as it holds a value or somebody waits at it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from disttrain.store.protocol.answers import empty_text
from disttrain.store.protocol.arguments import Arguments, Refusal, checked_timeout, refuse, shown
from disttrain.store.protocol.parking import Parked, Table
from disttrain.store.protocol.wire import Op, Status


class Queues:
    """The queues of a store."""

    def __init__(
        self,
        arguments: Arguments,
        charge: Callable[[int, int], None],
        answer: Callable[[Parked, bytes | None], None],
        notify: Callable[[str], None],
    ) -> None:
        self._arguments = arguments
        self._charge = charge
        self._answer = answer
        self._came = notify
        self._values: dict[str, deque[bytes]] = {}
        self._pushers: Table = {}
        self._poppers: Table = {}
        self.tables = {Op.QUEUE_PUSH: self._pushers, Op.QUEUE_POP: self._poppers}
        """The requests that wait at each queue."""

    def push(self, name: str, value: bytes, capacity: int, timeout_s: float) -> Parked | None:
        """Op.QUEUE_PUSH."""
        self._arguments.check_key(name)
        self._arguments.check_value(name, value)
        if type(capacity) is not int or capacity < 0:
            refuse(f"the capacity of a queue is an int, at least 0 (any), not {shown(capacity)}.")
        checked_timeout(timeout_s)
        if name in self._poppers:
            self._answer(next(iter(self._poppers[name])), value)
            return None
        if capacity and len(self._values.get(name, ())) >= capacity:
            return Parked(Op.QUEUE_PUSH, self._pushers, {name}, timeout_s, (value, capacity))
        self._append(name, value)
        return None

    def pop(self, name: str, timeout_s: float) -> Parked | bytes:
        """Op.QUEUE_POP."""
        self._arguments.check_key(name)
        if timeout_s != 0 or type(timeout_s) not in (int, float):
            checked_timeout(timeout_s)
        queue = self._values.get(name)
        if queue is None:
            if timeout_s == 0:
                raise Refusal(Status.EMPTY, empty_text(name))
            return Parked(Op.QUEUE_POP, self._poppers, {name}, timeout_s)
        value = queue.popleft()
        if not queue:
            del self._values[name]
        self._charge(-1, -len(value))
        self._let_in(name)
        return value

    def holds(self, name: str) -> bool:
        """True if there is a value in the queue."""
        return name in self._values

    def length(self, name: str) -> int:
        """Op.QUEUE_LEN."""
        self._arguments.check_key(name)
        return len(self._values.get(name, ()))

    def copies(self) -> dict[str, list[bytes]]:
        """The values of all queues, by name."""
        return {name: list(values) for name, values in self._values.items()}

    def _append(self, name: str, value: bytes) -> None:
        self._charge(1, len(value))
        queue = self._values.setdefault(name, deque())
        queue.append(value)
        if len(queue) == 1:
            self._came(name)

    def _let_in(self, name: str) -> None:
        """Lets requests that wait to push go on, as far as there is room."""
        while name in self._pushers:
            first = next(iter(self._pushers[name]))
            value, capacity = first.argument
            if len(self._values.get(name, ())) >= capacity:
                return
            try:
                self._append(name, value)
            except Refusal:
                # Others have filled the store meanwhile; it goes on waiting for the next pop.
                return
            self._answer(first, None)
