"""The server's keys and values as a state machine: (connection, request) in, replies out. No sockets, clock, threads.

The caller passes the time. A request that cannot be answered yet is parked, and answered once, by whichever comes
first: the last missing key, a change, the barrier's last member, a value in the queue, or its deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from disttrain.store.protocol.answers import (
    barrier_text,
    mismatch_text,
    missing_text,
    overflow_text,
    queue_text,
    watch_text,
)
from disttrain.store.protocol.arguments import Arguments, Refusal, checked_timeout, counter, refuse, shown
from disttrain.store.protocol.limits import Limits
from disttrain.store.protocol.parking import Parked, Parking, Table
from disttrain.store.protocol.queues import Queues
from disttrain.store.protocol.wire import Message, Op, Status

Outgoing = tuple[int, Message]
"""(connection, reply)."""

NEVER_S: Final = float("inf")
"""As the time of a request: its deadline never comes; who uses this calls `give_up` instead of `expire`."""

INT64_MAX: Final = (1 << 63) - 1
_VALUE_OVERHEAD_BYTES: Final = 5
_REPLY_OVERHEAD_BYTES: Final = 32


class StoreState:
    """Keys, values and everybody who waits for them."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._arguments = Arguments(self.limits)
        self._check_key = self._arguments.check_key
        self._check_value = self._arguments.check_value
        self._values: dict[str, bytes] = {}
        self._num_values = 0
        self._total_bytes = 0
        self._parking = Parking()
        self._waiting: Table = {}
        self._barriers: Table = {}
        self._queues = Queues(self._arguments, self._charge, self._answer, self._changed)
        self._changing: dict[Op, Table] = {Op.BARRIER: self._barriers, **self._queues.tables}
        self._woken: list[Outgoing] = []
        self._handlers: dict[int, tuple[Callable[..., Any], int]] = {
            Op.SET: (self._set, 2),
            Op.GET: (self._get, 2),
            Op.ADD: (self._add, 2),
            Op.APPEND: (self._append, 2),
            Op.COMPARE_SET: (self._compare_set, 3),
            Op.CHECK: (self._check, 1),
            Op.WAIT: (self._wait, 2),
            Op.DELETE_KEY: (self._delete_key, 1),
            Op.NUM_KEYS: (self._num_keys, 0),
            Op.MULTI_GET: (self._multi_get, 2),
            Op.MULTI_SET: (self._multi_set, 2),
            Op.BARRIER: (self._barrier, 3),
            Op.LIST_KEYS: (self._list_keys, 1),
            Op.QUEUE_PUSH: (self._queues.push, 4),
            Op.QUEUE_POP: (self._queues.pop, 2),
            Op.QUEUE_LEN: (self._queues.length, 1),
            Op.WATCH: (self._watch, 3),
            Op.ADD_EACH: (self._add_each, 2),
            Op.BARRIER_EACH: (self._barrier_each, 4),
        }

    @property
    def num_parked(self) -> int:
        """The number of requests that wait for an answer."""
        return self._parking.num_parked

    @property
    def next_deadline_s(self) -> float | None:
        """The next time to call `expire`; it may turn out then that nothing has expired."""
        return self._parking.next_deadline_s

    def handle(self, connection: int, request: Message, now_s: float) -> list[Outgoing]:
        """The reply to `request`, if it can be answered now, and to whom it woke. Never raises, whatever is asked.

        Those that wait on a connection have an id each: see `waits`.
        """
        request_id = request[0] if request and type(request[0]) is int else -1
        try:
            if request_id < 0 or len(request) < 2:
                refuse("a request is [request_id, op, *arguments] with a request_id >= 0.")
            _, op, *arguments = request
            entry = self._handlers.get(op) if isinstance(op, int) else None
            if entry is None:
                if op == Op.CANCEL:
                    return self._cancel(connection, request_id, arguments)
                refuse(f"there is no operation {shown(op)}.")
            handler, num_arguments = entry
            if len(arguments) != num_arguments:
                refuse(f"{Op(op).name.lower()} takes {num_arguments} arguments, not {len(arguments)}.")
            result = handler(*arguments)
        except Refusal as refusal:
            return [(connection, [request_id, int(refusal.status), refusal.text])]
        if type(result) is Parked:
            self._parking.park(result, connection, request_id, now_s)
            return []
        reply = (connection, [request_id, 0, result])
        if not self._woken:
            return [reply]
        woken, self._woken = self._woken, []
        return [reply, *woken]

    def disconnect(self, connection: int) -> None:
        """Forget what `connection` waits for; a barrier that it had come to has one member less."""
        for parked in self._parking.of(connection):
            self._parking.leave(parked)

    def expire(self, now_s: float) -> list[Outgoing]:
        """Timeout replies to those whose deadline has come."""
        return [self._time_out(parked) for parked in self._parking.expired(now_s)]

    def give_up(self, connection: int) -> list[Outgoing]:
        """Timeout replies to all that `connection` waits for, whatever its deadlines."""
        return [self._time_out(parked) for parked in self._parking.of(connection)]

    def time_out(self, connection: int, request_id: int) -> list[Outgoing]:
        """The timeout reply to one request, if `connection` waits for it."""
        parked = self._parking.find(connection, request_id)
        return [] if parked is None else [self._time_out(parked)]

    def waits(self, connection: int, request_id: object) -> bool:
        """True while `connection` waits for an answer by this id: another request may not have it meanwhile."""
        return self._parking.find(connection, request_id) is not None

    # For a copy of this state.

    def copies(self) -> tuple[dict[str, bytes], dict[str, list[bytes]]]:
        """The keys with their values, and those of the queues."""
        return dict(self._values), self._queues.copies()

    def parked_changes(self) -> list[Parked]:
        """Requests that change something once they are answered; under each name in the order in which they came."""
        return [parked for table in self._changing.values() for row in table.values() for parked in row]

    def park(self, connection: int, request_id: int, op: Op, name: str, argument: Any, timeout_s: float) -> None:
        """Let one of `parked_changes` wait here too, without a deadline."""
        parked = Parked(op, self._changing[op], {name}, timeout_s, argument)
        self._parking.park(parked, connection, request_id, NEVER_S)

    def _cancel(self, connection: int, request_id: int, arguments: Message) -> list[Outgoing]:
        """Forget one request that the connection waits for; True when it did."""
        parked = self._parking.find(connection, arguments[0]) if len(arguments) == 1 else None
        if parked is not None:
            self._parking.leave(parked)
        return [(connection, [request_id, 0, parked is not None])]

    # Operations: each checks all of its arguments before it changes anything.

    def _set(self, key: str, value: bytes) -> None:
        self._check_key(key)
        self._check_value(key, value)
        self._store(key, value)

    def _get(self, key: str, timeout_s: float) -> bytes | Parked:
        self._check_key(key)
        value = self._values.get(key)
        if value is not None:
            return value
        return Parked(Op.GET, self._waiting, {key}, checked_timeout(timeout_s), [key])

    def _add(self, key: str, amount: int) -> int:
        self._check_key(key)
        if type(amount) is not int:
            refuse("add takes an int.")
        total = counter(key, self._values.get(key, b"0")) + amount
        if not -INT64_MAX - 1 <= total <= INT64_MAX:
            refuse(overflow_text(key))
        self._store(key, b"%d" % total)
        return total

    def _add_each(self, keys: list[str], amounts: list[int]) -> list[int]:
        self._arguments.check_keys(keys)
        if type(amounts) is not list or len(amounts) != len(keys) or any(type(amount) is not int for amount in amounts):
            refuse("add_each takes an int for each key.")
        last: dict[str, int] = {}
        totals = []
        try:
            for key, amount in zip(keys, amounts, strict=True):
                before = last[key] if key in last else counter(key, self._values.get(key, b"0"))
                total = last[key] = before + amount
                if not -INT64_MAX - 1 <= total <= INT64_MAX:
                    refuse(overflow_text(key))
                totals.append(total)
        except Refusal as refusal:
            raise Refusal(Status.APART, refusal.text) from None
        self._store_all({key: b"%d" % total for key, total in last.items()})
        return totals

    def _append(self, key: str, value: bytes) -> None:
        self._check_key(key)
        self._check_value(key, value)
        whole = self._values.get(key, b"") + value
        self._check_value(key, whole)
        self._store(key, whole)

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        self._check_key(key)
        self._check_value(key, expected)
        self._check_value(key, desired)
        value = self._values.get(key)
        if value == expected or (value is None and not expected):
            self._store(key, desired)
            return desired
        return expected if value is None else value

    def _check(self, keys: list[str]) -> bool:
        self._arguments.check_keys(keys)
        return all(key in self._values or self._queues.holds(key) for key in keys)

    def _wait(self, keys: list[str], timeout_s: float) -> Parked | None:
        self._arguments.check_keys(keys)
        timeout_s = checked_timeout(timeout_s)
        missing = self._last_missing(keys, Op.WAIT)
        return None if missing is None else Parked(Op.WAIT, self._waiting, {missing}, timeout_s, keys)

    def _delete_key(self, key: str) -> bool:
        self._check_key(key)
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._charge(-1, -len(key) - len(value))
        self._changed(key)
        return True

    def _num_keys(self) -> int:
        return len(self._values)

    def _list_keys(self, prefix: str) -> list[str]:
        self._check_key(prefix)
        keys = sorted(key for key in self._values if key.startswith(prefix))
        self._check_reply(f"the reply with {len(keys)} keys", sum(map(len, keys)), len(keys))
        return keys

    def _multi_get(self, keys: list[str], timeout_s: float) -> list[bytes] | Parked:
        self._arguments.check_keys(keys)
        timeout_s = checked_timeout(timeout_s)
        missing = self._last_missing(keys, Op.MULTI_GET)
        if missing is None:
            return self._values_of(keys)
        return Parked(Op.MULTI_GET, self._waiting, {missing}, timeout_s, keys)

    def _multi_set(self, keys: list[str], values: list[bytes]) -> None:
        self._arguments.check_keys(keys)
        if type(values) is not list or len(values) != len(keys):
            refuse("multi_set takes as many values as keys.")
        self._arguments.check_values(keys, values)
        # All come at once: whoever is woken by one sees the others too, and of a key that is named twice the last.
        self._store_all(dict(zip(keys, values, strict=True)))

    def _watch(self, key: str, seen: bytes | None, timeout_s: float) -> bytes | Parked | None:
        self._check_key(key)
        if seen is not None:
            self._check_value(key, seen)
        timeout_s = checked_timeout(timeout_s)
        value = self._values.get(key)
        return Parked(Op.WATCH, self._waiting, {key}, timeout_s, seen) if value == seen else value

    def _barrier(self, name: str, num_members: int, timeout_s: float) -> Parked | None:
        return self._barrier_each(name, num_members, timeout_s, 1)

    def _barrier_each(self, name: str, num_members: int, timeout_s: float, num_together: int) -> Parked | None:
        self._check_key(name)
        if type(num_members) is not int or num_members < 1:
            refuse(f"barrier {name!r} needs at least one member, as an int.")
        timeout_s = checked_timeout(timeout_s)
        if type(num_together) is not int or num_together < 1:
            refuse(f"those that come together to barrier {name!r} are at least one, as an int.")
        members = self._barriers.get(name, {})
        for first in members:
            if first.argument[0] != num_members:
                refuse(mismatch_text(name, num_members, first.argument[0]))
            break
        num_came = self._parking.num_at(name, self._barriers) + num_together
        if num_came < num_members:
            return Parked(Op.BARRIER, self._barriers, {name}, timeout_s, [num_members, num_together])
        if num_came > num_members:
            # Some of them complete it, and the others wait for the next ones to come.
            raise Refusal(Status.APART, f"{num_came} came to barrier {name!r} of {num_members} members.")
        for parked in list(members):
            self._answer(parked, None)
        return None

    # Keys that come, and who waits for them.

    def _store_all(self, pairs: dict[str, bytes]) -> None:
        stored = self._values
        num_fresh = num_bytes = 0
        for key, value in pairs.items():
            num_bytes += len(value)
            if key in stored:
                num_bytes -= len(stored[key])
            else:
                num_fresh += 1
                num_bytes += len(key)
        self._charge(num_fresh, num_bytes)
        self._values.update(pairs)
        if self._waiting:
            for key in pairs:
                if key in self._waiting:
                    self._changed(key)

    def _store(self, key: str, value: bytes) -> None:
        old = self._values.get(key)
        if old is None:
            self._charge(1, len(key) + len(value))
        elif len(old) != len(value):
            self._charge(0, len(value) - len(old))
        self._values[key] = value
        if self._waiting:
            self._changed(key)

    def _charge(self, num_values: int, num_bytes: int) -> None:
        """Count what comes or, with negative numbers, goes."""
        limits = self.limits
        if num_values > 0 and self._num_values + num_values > limits.num_keys:
            self._arguments.over("the store", self._num_values + num_values, "num_keys")
        if num_bytes > 0 and self._total_bytes + num_bytes > limits.total_bytes:
            self._arguments.over("the store", self._total_bytes + num_bytes, "total_bytes")
        self._num_values += num_values
        self._total_bytes += num_bytes

    def _changed(self, key: str) -> None:
        for parked in self._waiting.pop(key, ()):
            parked.names.discard(key)
            if parked.op is Op.WATCH:
                value = self._values.get(key)
                if value == parked.argument:
                    parked.stand_under(key)
                else:
                    self._answer(parked, value)
            else:
                missing = self._last_missing(parked.argument, parked.op)
                if missing is None:
                    self._wake(parked)
                else:
                    parked.stand_under(missing)

    def _last_missing(self, keys: list[str], op: Op) -> str | None:
        """The key that a request for `keys` is to wait under, if any. Who waits takes a queue for a key, too.

        One is enough, and the last comes late when all wait for all: N clients cost N steps and not N * N.
        """
        return next((key for key in reversed(keys) if self._is_missing(key, op)), None)

    def _is_missing(self, key: str, op: Op) -> bool:
        return key not in self._values and not (op is Op.WAIT and self._queues.holds(key))

    def _wake(self, parked: Parked) -> None:
        if parked.op is Op.WAIT:
            self._answer(parked, None)
        elif parked.op is Op.GET:
            self._answer(parked, self._values[parked.argument[0]])
        else:
            try:
                self._answer(parked, self._values_of(parked.argument))
            except Refusal as refusal:
                self._answer(parked, refusal.text, refusal.status)

    def _answer(self, parked: Parked, value: Any, status: Status = Status.OK) -> None:
        self._parking.leave(parked)
        self._woken.append((parked.connection, [parked.request_id, int(status), value]))

    def _time_out(self, parked: Parked) -> Outgoing:
        text = self._timeout_text(parked)
        self._parking.leave(parked)
        return parked.connection, [parked.request_id, int(Status.TIMEOUT), text]

    def _timeout_text(self, parked: Parked) -> str:
        if parked.op is Op.BARRIER:
            num_came = self._parking.num_at(parked.name, self._barriers)
            return barrier_text(parked.name, num_came, parked.argument[0], parked.timeout_s)
        if parked.op is Op.WATCH:
            return watch_text(parked.name, parked.timeout_s)
        if parked.op in (Op.QUEUE_PUSH, Op.QUEUE_POP):
            return queue_text(parked.name, parked.op is Op.QUEUE_PUSH, parked.timeout_s)
        missing = {key for key in parked.argument if self._is_missing(key, parked.op)}
        return missing_text(missing, len(parked.argument), parked.timeout_s)

    def _values_of(self, keys: list[str]) -> list[bytes]:
        values = [self._values[key] for key in keys]
        self._check_reply(f"the reply with the values of {len(keys)} keys", sum(map(len, values)), len(values))
        return values

    def _check_reply(self, subject: str, num_bytes: int, num_items: int) -> None:
        reply_bytes = num_bytes + _VALUE_OVERHEAD_BYTES * num_items + _REPLY_OVERHEAD_BYTES
        if reply_bytes > self.limits.frame_bytes:
            self._arguments.over(subject, reply_bytes, "frame_bytes")
