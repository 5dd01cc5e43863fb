"""What a store promises: the one interface that rendezvous, process groups and the launcher know."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, Self

from disttrain.durations import Duration

Value = bytes | str
"""What may be stored; a str is stored as its UTF-8 bytes."""


class Store(Protocol):
    """A key-value store shared by the processes of a job. Keys are str, values are bytes.

    Names and meanings are those of `torch.distributed.Store`. Every method is safe to call from any thread.
    Timeouts are seconds or a `timedelta`; None means the store's own `timeout_s`.
    Errors: StoreTimeoutError when a wait is over, StoreConnectionError when the store is gone, StoreLimitError when a
    key or value is too large.
    """

    @property
    def timeout_s(self) -> float:
        """Seconds that `get`, `wait` and `barrier` wait unless told otherwise."""
        ...

    @property
    def timeout(self) -> timedelta:
        """`timeout_s`, as torch has it."""
        ...

    def set_timeout(self, timeout: Duration) -> None:
        """Change `timeout_s`."""
        ...

    def set(self, key: str, value: Value) -> None:
        """Store `value`, waking whoever waits for `key`."""
        ...

    def get(self, key: str) -> bytes:
        """The value of `key`; waits for it where it does not exist yet."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to the counter at `key` (0 where absent) and return the sum; `get` shows it as decimal text."""
        ...

    def append(self, key: str, value: Value) -> None:
        """Append to the value at `key` (empty where absent)."""
        ...

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Store `desired` if the value is `expected`, or if `key` is absent and `expected` is empty.

        Returns the value afterwards; `expected` itself where `key` is absent and `expected` is not empty.
        """
        ...

    def check(self, keys: Sequence[str]) -> bool:
        """True when all keys exist; never waits."""
        ...

    def wait(self, keys: Sequence[str], timeout: Duration | None = None) -> None:
        """Return once all keys exist."""
        ...

    def watch(self, key: str, seen: Value | None, timeout: Duration | None = None) -> bytes | None:
        """The value of `key` (None: it has none) as soon as it is not `seen`: at once, or when it changes.

        Watching again with what was returned misses no last value; changes that follow each other faster than the
        watcher asks are seen as one.
        """
        ...

    def delete_key(self, key: str) -> bool:
        """True when the key existed."""
        ...

    def num_keys(self) -> int:
        """How many keys exist."""
        ...

    def list_keys(self, prefix: str = "") -> list[str]:
        """The keys that begin with `prefix`, sorted."""
        ...

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys, waiting for those that don't exist yet, in one round trip."""
        ...

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Store several values in one round trip."""
        ...

    def queue_push(self, key: str, value: Value, capacity: int | None = None, timeout: Duration | None = None) -> None:
        """Put `value` at the end of the queue `key`; waits while it holds `capacity` values (None: any number).

        Queues have names of their own: they are not among the keys.
        """
        ...

    def queue_pop(self, key: str, block: bool = True, timeout: Duration | None = None) -> bytes:
        """Take the first value of the queue `key`; waits for one where it is empty.

        Who waits longest gets the next value. Raises StoreQueueEmptyError where it is empty and `block` is False. A
        caller that is interrupted while it waits may have taken a value without seeing it.
        """
        ...

    def queue_len(self, key: str) -> int:
        """How many values the queue `key` holds."""
        ...

    def barrier(self, name: str, num_members: int, timeout: Duration | None = None) -> None:
        """Return once `num_members` callers have called with this `name`; one round trip each.

        The name may be used again afterwards: the next `num_members` callers make the next barrier.
        """
        ...

    def clone(self) -> Self:
        """The same store over a connection of its own, to be closed on its own."""
        ...

    def close(self) -> None:
        """Let go of what this object holds (a connection, a server it started). Idempotent."""
        ...
