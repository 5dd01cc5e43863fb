"""The methods of a store, each as one request: what the three stores that keep keys themselves have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, Self

from disttrain.durations import Duration, seconds
from disttrain.store.answers import checked_pairs, error_of, to_bytes, to_keys
from disttrain.store.base import Value
from disttrain.store.wire import Answer, Op, Status

LONGEST_S: Final = 1e9
"""Thirty years stand for every longer timeout, infinity too: the clocks underneath overflow."""


class StoreMethods(ABC):
    """`Store`, but for how a request gets its answer; see `disttrain.store.base` for what each method promises."""

    def __init__(self, operation: str, timeout: Duration, where: str) -> None:
        self._timeout_s = _bounded_s(operation, timeout)
        self._where = where

    @abstractmethod
    def _request(self, op: Op, *arguments: Any, wait_s: float) -> Answer:
        """Ask, and wait up to `wait_s` for the answer."""

    @abstractmethod
    def clone(self) -> Self:
        """The same store, to be used and closed on its own."""

    @abstractmethod
    def close(self) -> None:
        """Fail every request under way through this object and all that follow. Idempotent."""

    def _ask(self, op: Op, *arguments: Any, wait_s: float | None = None) -> Any:
        answer = self._request(op, *arguments, wait_s=self._timeout_s if wait_s is None else wait_s)
        if answer[0] != Status.OK:
            raise error_of(op, answer, self._where)
        return answer[1]

    @property
    def timeout_s(self) -> float:
        """Seconds that an operation waits unless told otherwise."""
        return self._timeout_s

    def set_timeout(self, timeout: Duration) -> None:
        """Change `timeout_s`."""
        self._timeout_s = _bounded_s("set_timeout", timeout)

    def set(self, key: str, value: Value) -> None:
        """Store `value`, waking whoever waits for `key`."""
        self._ask(Op.SET, key, to_bytes(value))

    def get(self, key: str) -> bytes:
        """The value of `key`; waits for it where it does not exist yet."""
        value: bytes = self._ask(Op.GET, key, self._timeout_s)
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to the counter at `key` (0 where absent) and return the sum."""
        total: int = self._ask(Op.ADD, key, amount)
        return total

    def append(self, key: str, value: Value) -> None:
        """Append to the value at `key` (empty where absent)."""
        self._ask(Op.APPEND, key, to_bytes(value))

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Store `desired` if the value is `expected` (or absent and `expected` empty); see `Store.compare_set`."""
        value: bytes = self._ask(Op.COMPARE_SET, key, to_bytes(expected), to_bytes(desired))
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """True when all keys exist; never waits."""
        exist: bool = self._ask(Op.CHECK, to_keys("check", keys))
        return exist

    def wait(self, keys: Sequence[str], timeout: Duration | None = None) -> None:
        """Return once all keys exist."""
        wait_s = self._timeout_s if timeout is None else _bounded_s("wait", timeout)
        self._ask(Op.WAIT, to_keys("wait", keys), wait_s, wait_s=wait_s)

    def delete_key(self, key: str) -> bool:
        """True when the key existed."""
        existed: bool = self._ask(Op.DELETE_KEY, key)
        return existed

    def num_keys(self) -> int:
        """How many keys exist."""
        num_keys: int = self._ask(Op.NUM_KEYS)
        return num_keys

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys, waiting for those that don't exist yet, in one round trip."""
        values: list[bytes] = self._ask(Op.MULTI_GET, to_keys("multi_get", keys), self._timeout_s)
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Store several values in one round trip."""
        self._ask(Op.MULTI_SET, *checked_pairs(keys, values))

    def barrier(self, name: str, num_members: int, timeout: Duration | None = None) -> None:
        """Return once `num_members` callers have called with this `name`; one round trip each."""
        wait_s = self._timeout_s if timeout is None else _bounded_s("barrier", timeout)
        self._ask(Op.BARRIER, name, num_members, wait_s, wait_s=wait_s)


def _bounded_s(operation: str, timeout: Duration) -> float:
    return min(seconds(operation, timeout), LONGEST_S)
