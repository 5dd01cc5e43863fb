"""The methods of a store, each as one request: what the three stores that keep keys themselves have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, Self

from disttrain.store.base import Store
from disttrain.store.durations import Duration, seconds_or_none_at_all
from disttrain.store.protocol.answers import error_of
from disttrain.store.protocol.values import Value, checked_capacity, checked_pairs, to_bytes, to_keys
from disttrain.store.protocol.wire import Answer, Op

LONGEST_S: Final = 1e9
"""Thirty years stand for every longer timeout, infinity too: the clocks underneath overflow."""

# Python 3.11 takes as long to look up a member of an enum as msgpack to pack the whole request.
_SET, _GET, _ADD, _CHECK, _WAIT = Op.SET, Op.GET, Op.ADD, Op.CHECK, Op.WAIT
_MULTI_GET, _MULTI_SET, _BARRIER = Op.MULTI_GET, Op.MULTI_SET, Op.BARRIER


class StoreMethods(Store, ABC):
    """`Store`, but for how a request gets its answer; see `disttrain.store.base` for what each method promises."""

    def __init__(self, operation: str, timeout: Duration, where: str) -> None:
        self._timeout_s = _bounded_s(operation, timeout)
        self._where = where

    @abstractmethod
    def _request(self, op: Op, arguments: tuple[Any, ...], wait_s: float) -> Answer:
        """Ask, and wait up to `wait_s` for the answer."""

    @abstractmethod
    def clone(self) -> Self:
        """The same store, to be used and closed on its own."""

    @abstractmethod
    def close(self) -> None:
        """Fail every request under way through this object and all that follow. Idempotent."""

    def _ask(self, op: Op, wait_s: float, *arguments: Any) -> Any:
        status, value = answer = self._request(op, arguments, wait_s)
        if status:
            raise error_of(op, answer, self._where)
        return value

    def _wait_s(self, operation: str, timeout: Duration | None) -> float:
        return self._timeout_s if timeout is None else _bounded_s(operation, timeout)

    def has_extended_api(self) -> bool:
        """Yes: each method is one request."""
        return True

    def set_timeout(self, timeout: Duration) -> None:
        """Change `timeout_s`."""
        self._timeout_s = _bounded_s("set_timeout", timeout)

    def set(self, key: str, value: Value) -> None:
        """Store `value`, waking whoever waits for `key`."""
        self._ask(_SET, self._timeout_s, key, to_bytes(value))

    def get(self, key: str) -> bytes:
        """The value of `key`; waits for it where it does not exist yet."""
        value: bytes = self._ask(_GET, self._timeout_s, key, self._timeout_s)
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to the counter at `key` (0 where absent) and return the sum."""
        total: int = self._ask(_ADD, self._timeout_s, key, amount)
        return total

    def append(self, key: str, value: Value) -> None:
        """Append to the value at `key` (empty where absent)."""
        self._ask(Op.APPEND, self._timeout_s, key, to_bytes(value))

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Store `desired` if the value is `expected` (or absent and `expected` empty); see `Store.compare_set`."""
        value: bytes = self._ask(Op.COMPARE_SET, self._timeout_s, key, to_bytes(expected), to_bytes(desired))
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """True when all keys exist; never waits."""
        exist: bool = self._ask(_CHECK, self._timeout_s, to_keys("check", keys))
        return exist

    def wait(self, keys: Sequence[str], timeout: Duration | None = None) -> None:
        """Return once all keys exist."""
        wait_s = self._wait_s("wait", timeout)
        self._ask(_WAIT, wait_s, to_keys("wait", keys), wait_s)

    def watch(self, key: str, seen: Value | None, timeout: Duration | None = None) -> bytes | None:
        """The value of `key` (None: it has none) as soon as it is not `seen`."""
        wait_s = self._wait_s("watch", timeout)
        value: bytes | None = self._ask(Op.WATCH, wait_s, key, None if seen is None else to_bytes(seen), wait_s)
        return value

    def delete_key(self, key: str) -> bool:
        """True when the key existed."""
        existed: bool = self._ask(Op.DELETE_KEY, self._timeout_s, key)
        return existed

    def num_keys(self) -> int:
        """The number of keys."""
        num_keys: int = self._ask(Op.NUM_KEYS, self._timeout_s)
        return num_keys

    def list_keys(self, prefix: str = "") -> list[str]:
        """The keys that begin with `prefix`, sorted."""
        keys: list[str] = self._ask(Op.LIST_KEYS, self._timeout_s, prefix)
        return keys

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys, waiting for those that don't exist yet, in one round trip."""
        values: list[bytes] = self._ask(_MULTI_GET, self._timeout_s, to_keys("multi_get", keys), self._timeout_s)
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Store several values in one round trip."""
        self._ask(_MULTI_SET, self._timeout_s, *checked_pairs(keys, values))

    def queue_push(self, key: str, value: Value, capacity: int | None = None, timeout: Duration | None = None) -> None:
        """Put `value` at the end of the queue `key`; waits while it holds `capacity` values (None: any number)."""
        wait_s = self._wait_s("queue_push", timeout)
        self._ask(Op.QUEUE_PUSH, wait_s, key, to_bytes(value), checked_capacity(capacity), wait_s)

    def queue_pop(self, key: str, block: bool = True, timeout: Duration | None = None) -> bytes:
        """Take the first value of the queue `key`; where it is empty, wait for one, or raise StoreQueueEmptyError."""
        wait_s = self._wait_s("queue_pop", timeout)
        value: bytes = self._ask(Op.QUEUE_POP, wait_s, key, wait_s if block else 0)
        return value

    def queue_len(self, key: str) -> int:
        """The number of values in the queue `key`."""
        num_values: int = self._ask(Op.QUEUE_LEN, self._timeout_s, key)
        return num_values

    def barrier(self, name: str, num_members: int, timeout: Duration | None = None) -> None:
        """Return once `num_members` callers have called with this `name`; one round trip each."""
        wait_s = self._wait_s("barrier", timeout)
        self._ask(_BARRIER, wait_s, name, num_members, wait_s)


def _bounded_s(operation: str, timeout: Duration) -> float:
    return min(seconds_or_none_at_all(operation, timeout), LONGEST_S)
