"""The store's server as a state machine: (connection, request) in, replies out. No sockets, no clock, no threads.

Who calls passes the time in. A request that cannot be answered yet is parked: under each key it misses or in its
barrier, with its connection, and in a heap of deadlines. It is answered once, by whichever comes first: the last
missing key, the barrier's last member, or its deadline. The heap forgets answered requests later (lazy deletion).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any, Final, NoReturn

from disttrain.store.answers import barrier_text, mismatch_text, missing_text, not_a_counter_text, overflow_text
from disttrain.store.limits import Limits, over_limit
from disttrain.store.wire import Message, Op, Status

Outgoing = tuple[int, Message]
"""(connection, reply)."""

NEVER_S: Final = float("inf")
"""As the time of a request: its deadline never comes; who uses this calls `give_up` instead of `expire`."""

INT64_MAX: Final = (1 << 63) - 1
_INT64_CHARS: Final = 20
_HEAP_SLACK: Final = 64
_VALUE_OVERHEAD_BYTES: Final = 5
_REPLY_OVERHEAD_BYTES: Final = 32


class _Refusal(Exception):
    """Ends a request with a status and a sentence."""

    def __init__(self, status: Status, text: str) -> None:
        self.status = status
        self.text = text


class _Parked:
    """A request that waits for keys, or (then `barrier` is set) for the other members of a barrier."""

    __slots__ = ("barrier", "connection", "keys", "live", "missing", "op", "request_id", "timeout_s")

    def __init__(self, op: Op, keys: list[str], timeout_s: float, barrier: _Barrier | None = None) -> None:
        self.op = op
        self.keys = keys
        self.timeout_s = timeout_s
        self.barrier = barrier
        self.missing: set[str] = set()
        self.connection = -1
        self.request_id = -1
        self.live = True


class _Barrier:
    __slots__ = ("members", "name", "num_members")

    def __init__(self, name: str, num_members: int) -> None:
        self.name = name
        self.num_members = num_members
        self.members: dict[_Parked, None] = {}


class StoreState:
    """Keys, values and everybody who waits for them."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, dict[_Parked, None]] = {}
        self._barriers: dict[str, _Barrier] = {}
        self._parked: dict[int, dict[_Parked, None]] = {}
        self._num_parked = 0
        self._deadlines: list[tuple[float, int, _Parked]] = []
        self._sequence = itertools.count()
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
        }

    @property
    def num_parked(self) -> int:
        """How many requests wait for an answer."""
        return self._num_parked

    @property
    def next_deadline_s(self) -> float | None:
        """When `expire` wants to be called; it may turn out then that nothing has expired."""
        return self._deadlines[0][0] if self._deadlines else None

    def handle(self, connection: int, request: Message, now_s: float) -> list[Outgoing]:
        """The reply to `request`, if it can be answered now, and to whom it woke. Never raises, whatever is asked."""
        request_id = request[0] if request and type(request[0]) is int else -1
        try:
            handler, arguments = self._handler_of(request)
            result = handler(*arguments)
        except _Refusal as refusal:
            return [(connection, [request_id, int(refusal.status), refusal.text])]
        if type(result) is _Parked:
            self._park(result, connection, request_id, now_s)
            return []
        reply = (connection, [request_id, 0, result])
        if not self._woken:
            return [reply]
        woken, self._woken = self._woken, []
        return [reply, *woken]

    def disconnect(self, connection: int) -> None:
        """Forget what `connection` waits for; a barrier that it had come to has one member less."""
        for parked in list(self._parked.get(connection, ())):
            self._unpark(parked)

    def expire(self, now_s: float) -> list[Outgoing]:
        """Timeout replies to those whose deadline has come."""
        outgoing: list[Outgoing] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            parked = heapq.heappop(self._deadlines)[2]
            if parked.live:
                outgoing.append(self._time_out(parked))
        return outgoing

    def give_up(self, connection: int) -> list[Outgoing]:
        """Timeout replies to all that `connection` waits for, whatever its deadlines."""
        return [self._time_out(parked) for parked in list(self._parked.get(connection, ()))]

    def _handler_of(self, request: Message) -> tuple[Callable[..., Any], Message]:
        if len(request) < 2 or type(request[0]) is not int or request[0] < 0:
            _refuse("a request is [request_id, op, *arguments] with a request_id >= 0.")
        op, arguments = request[1], request[2:]
        if type(op) not in (int, Op) or op not in self._handlers:
            _refuse(f"there is no operation {_shown(op)}.")
        handler, num_arguments = self._handlers[op]
        if len(arguments) != num_arguments:
            _refuse(f"{Op(op).name.lower()} takes {num_arguments} arguments, not {len(arguments)}.")
        return handler, arguments

    # Operations: each checks all of its arguments before it changes anything.

    def _set(self, key: str, value: bytes) -> None:
        self._check_key(key)
        self._check_value(key, value)
        self._store(key, value)

    def _get(self, key: str, timeout_s: float) -> bytes | _Parked:
        self._check_key(key)
        value = self._values.get(key)
        return _Parked(Op.GET, [key], _checked_timeout(timeout_s)) if value is None else value

    def _add(self, key: str, amount: int) -> int:
        self._check_key(key)
        if type(amount) is not int:
            _refuse("add takes an int.")
        total = _counter(key, self._values.get(key, b"0")) + amount
        if not -INT64_MAX - 1 <= total <= INT64_MAX:
            _refuse(overflow_text(key))
        self._store(key, b"%d" % total)
        return total

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
        self._check_keys(keys)
        return all(key in self._values for key in keys)

    def _wait(self, keys: list[str], timeout_s: float) -> _Parked | None:
        self._check_keys(keys)
        timeout_s = _checked_timeout(timeout_s)
        return None if all(key in self._values for key in keys) else _Parked(Op.WAIT, keys, timeout_s)

    def _delete_key(self, key: str) -> bool:
        self._check_key(key)
        return self._values.pop(key, None) is not None

    def _num_keys(self) -> int:
        return len(self._values)

    def _multi_get(self, keys: list[str], timeout_s: float) -> list[bytes] | _Parked:
        self._check_keys(keys)
        timeout_s = _checked_timeout(timeout_s)
        if all(key in self._values for key in keys):
            return self._values_of(keys)
        return _Parked(Op.MULTI_GET, keys, timeout_s)

    def _multi_set(self, keys: list[str], values: list[bytes]) -> None:
        self._check_keys(keys)
        if type(values) is not list or len(values) != len(keys):
            _refuse("multi_set takes as many values as keys.")
        for key, value in zip(keys, values, strict=True):
            self._check_value(key, value)
        # All come at once: whoever is woken by one sees the others too, and of a key that is named twice the last.
        self._values.update(zip(keys, values, strict=True))
        for key in keys:
            self._came(key)

    def _barrier(self, name: str, num_members: int, timeout_s: float) -> _Parked | None:
        self._check_key(name)
        if type(num_members) is not int or num_members < 1:
            _refuse(f"barrier {name!r} needs at least one member, as an int.")
        timeout_s = _checked_timeout(timeout_s)
        barrier = self._barriers.get(name) or _Barrier(name, num_members)
        if barrier.num_members != num_members:
            _refuse(mismatch_text(name, num_members, barrier.num_members))
        if len(barrier.members) + 1 < num_members:
            return _Parked(Op.BARRIER, [], timeout_s, barrier)
        for parked in list(barrier.members):
            self._answer(parked, None)
        return None

    # Keys that come, and who waits for them.

    def _store(self, key: str, value: bytes) -> None:
        self._values[key] = value
        if key in self._waiting:
            self._came(key)

    def _came(self, key: str) -> None:
        for parked in self._waiting.pop(key, ()):
            parked.missing.discard(key)
            # A key that came earlier may have been deleted since: then the wait goes on.
            if not parked.missing and not self._miss(parked):
                self._wake(parked)

    def _miss(self, parked: _Parked) -> bool:
        """Enter `parked` under the keys that it misses; False when there are none."""
        parked.missing = {key for key in parked.keys if key not in self._values}
        for key in parked.missing:
            self._waiting.setdefault(key, {})[parked] = None
        return bool(parked.missing)

    def _wake(self, parked: _Parked) -> None:
        if parked.op is Op.WAIT:
            self._answer(parked, None)
        elif parked.op is Op.GET:
            self._answer(parked, self._values[parked.keys[0]])
        else:
            try:
                self._answer(parked, self._values_of(parked.keys))
            except _Refusal as refusal:
                self._answer(parked, refusal.text, refusal.status)

    def _answer(self, parked: _Parked, value: Any, status: Status = Status.OK) -> None:
        self._unpark(parked)
        self._woken.append((parked.connection, [parked.request_id, int(status), value]))

    def _park(self, parked: _Parked, connection: int, request_id: int, now_s: float) -> None:
        parked.connection = connection
        parked.request_id = request_id
        self._parked.setdefault(connection, {})[parked] = None
        self._num_parked += 1
        if parked.barrier is None:
            self._miss(parked)
        else:
            parked.barrier.members[parked] = None
            self._barriers[parked.barrier.name] = parked.barrier
        heapq.heappush(self._deadlines, (now_s + parked.timeout_s, next(self._sequence), parked))
        if len(self._deadlines) > 2 * self._num_parked + _HEAP_SLACK:
            self._deadlines = [entry for entry in self._deadlines if entry[2].live]
            heapq.heapify(self._deadlines)

    def _time_out(self, parked: _Parked) -> Outgoing:
        text = _timeout_text(parked)
        self._unpark(parked)
        return parked.connection, [parked.request_id, int(Status.TIMEOUT), text]

    def _unpark(self, parked: _Parked) -> None:
        parked.live = False
        self._num_parked -= 1
        _discard(self._parked, parked.connection, parked)
        for key in parked.missing:
            _discard(self._waiting, key, parked)
        if parked.barrier is not None:
            del parked.barrier.members[parked]
            if not parked.barrier.members:
                del self._barriers[parked.barrier.name]

    def _values_of(self, keys: list[str]) -> list[bytes]:
        values = [self._values[key] for key in keys]
        reply_bytes = sum(map(len, values)) + _VALUE_OVERHEAD_BYTES * len(values) + _REPLY_OVERHEAD_BYTES
        if reply_bytes > self.limits.frame_bytes:
            what = f"the reply with the values of {len(keys)} keys"
            raise _Refusal(Status.LIMIT, over_limit(what, reply_bytes, "frame_bytes", self.limits))
        return values

    # Arguments.

    def _check_key(self, key: str) -> None:
        if type(key) is not str:
            _refuse(f"a key is a str, not {type(key).__name__}.")
        limit = self.limits.key_bytes
        if 4 * len(key) > limit and (num_bytes := len(key.encode(errors="surrogatepass"))) > limit:
            text = over_limit(f"the key {key[:32]!r}...", num_bytes, "key_bytes", self.limits)
            raise _Refusal(Status.LIMIT, text)

    def _check_keys(self, keys: list[str]) -> None:
        if type(keys) is not list:
            _refuse(f"keys come as a list, not {type(keys).__name__}.")
        for key in keys:
            self._check_key(key)

    def _check_value(self, key: str, value: bytes) -> None:
        if type(value) is not bytes:
            _refuse(f"the value of key {key!r} is bytes, not {type(value).__name__}.")
        if len(value) > self.limits.value_bytes:
            text = over_limit(f"the value of key {key!r}", len(value), "value_bytes", self.limits)
            raise _Refusal(Status.LIMIT, text)


def _refuse(text: str) -> NoReturn:
    raise _Refusal(Status.REFUSED, text)


def _counter(key: str, text: bytes) -> int:
    if len(text) <= _INT64_CHARS:
        try:
            return int(text)
        except ValueError:
            pass
    _refuse(not_a_counter_text(key))


def _checked_timeout(timeout_s: float) -> float:
    # The comparison is false for NaN as well.
    if type(timeout_s) not in (int, float) or not 0 < timeout_s < float("inf"):
        _refuse(f"a timeout is a positive number of seconds, not {_shown(timeout_s)}.")
    return timeout_s


def _shown(value: object) -> str:
    """A value that a client sent where a number belongs; what is deep or long is not shown."""
    return repr(value) if type(value) in (int, float) else f"a {type(value).__name__}"


def _discard(table: dict[Any, dict[_Parked, None]], key: object, parked: _Parked) -> None:
    """Take `parked` out of `table[key]`, and that entry out of the table when it was the last."""
    row = table[key]
    del row[parked]
    if not row:
        del table[key]


def _timeout_text(parked: _Parked) -> str:
    if parked.barrier is not None:
        barrier = parked.barrier
        return barrier_text(barrier.name, len(barrier.members), barrier.num_members, parked.timeout_s)
    return missing_text(parked.missing, len(parked.keys), parked.timeout_s)
