"""The interface of all stores: the one that rendezvous, process groups and the launcher know."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Self

from disttrain.errors import SettingError
from disttrain.store.durations import Duration, seconds_or_none_at_all
from disttrain.store.protocol.values import Value, checked_pairs, to_bytes


class Store:
    """A key-value store shared by the processes of a job. Keys are str, values are bytes.

    Names and meanings are those of `torch.distributed.Store`. Every method is safe to call from any thread.
    Timeouts are seconds or a `timedelta`; None means the store's own `timeout_s`.
    Errors: StoreTimeoutError when a wait is over, StoreConnectionError when the store is gone, StoreLimitError when a
    key or value is too large.

    A program's own store derives from this class. `append`, `multi_get` and `multi_set` then do with its `set`, `get`
    and `compare_set`; what it needs and does not have is a NotImplementedError. Values come to it as bytes.
    """

    _timeout_s = 300.0

    @property
    def timeout_s(self) -> float:
        """Seconds that `get`, `wait` and `barrier` wait unless told otherwise."""
        return self._timeout_s

    @property
    def timeout(self) -> timedelta:
        """`timeout_s`, as torch has it."""
        return timedelta(seconds=self.timeout_s)

    def set_timeout(self, timeout: Duration) -> None:
        """Change `timeout_s`."""
        self._timeout_s = seconds_or_none_at_all("set_timeout", timeout)

    def has_extended_api(self) -> bool:
        """True if `append`, `multi_get` and `multi_set` are one request each."""
        return False

    def set(self, key: str, value: Value) -> None:
        """Store `value`, waking whoever waits for `key`."""
        raise _absent(self, "set")

    def get(self, key: str) -> bytes:
        """The value of `key`; waits for it where it does not exist yet."""
        raise _absent(self, "get")

    def add(self, key: str, amount: int) -> int:
        """Add to the counter at `key` (0 where absent) and return the sum; `get` shows it as decimal text."""
        raise _absent(self, "add")

    def append(self, key: str, value: Value) -> None:
        """Append to the value at `key` (empty where absent)."""
        # To find out what is there: an absent key becomes an empty one.
        added = to_bytes(value)
        before = self.compare_set(key, b"", b"")
        while (after := self.compare_set(key, before, before + added)) != before + added:
            before = after

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Store `desired` if the value is `expected`, or if `key` is absent and `expected` is empty.

        Returns the value afterwards; `expected` itself where `key` is absent and `expected` is not empty.
        """
        raise _absent(self, "compare_set")

    def check(self, keys: Sequence[str]) -> bool:
        """True when all keys exist; never waits."""
        raise _absent(self, "check")

    def wait(self, keys: Sequence[str], timeout: Duration | None = None) -> None:
        """Return once all keys exist."""
        raise _absent(self, "wait")

    def watch(self, key: str, seen: Value | None, timeout: Duration | None = None) -> bytes | None:
        """The value of `key` (None: it has none) as soon as it is not `seen`: at once, or when it changes.

        Watching again with what was returned misses no last value; changes that follow each other faster than the
        watcher asks are seen as one.
        """
        raise _absent(self, "watch")

    def delete_key(self, key: str) -> bool:
        """True when the key existed."""
        raise _absent(self, "delete_key")

    def num_keys(self) -> int:
        """The number of keys."""
        raise _absent(self, "num_keys")

    def list_keys(self, prefix: str = "") -> list[str]:
        """The keys that begin with `prefix`, sorted."""
        raise _absent(self, "list_keys")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys, waiting for those that don't exist yet, in one round trip."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Store several values in one round trip."""
        for key, value in zip(*checked_pairs(keys, values), strict=True):
            self.set(key, value)

    def queue_push(self, key: str, value: Value, capacity: int | None = None, timeout: Duration | None = None) -> None:
        """Put `value` at the end of the queue `key`; waits while it holds `capacity` values (None: any number).

        Queues have names of their own, which `num_keys` and `list_keys` leave out; to `check` and `wait` one that holds
        a value is a key that exists.
        """
        raise _absent(self, "queue_push")

    def queue_pop(self, key: str, block: bool = True, timeout: Duration | None = None) -> bytes:
        """Take the first value of the queue `key`; waits for one where it is empty.

        Who waits longest gets the next value. Raises StoreQueueEmptyError where it is empty and `block` is False. A
        caller that is interrupted while it waits may have taken a value without seeing it.
        """
        raise _absent(self, "queue_pop")

    def queue_len(self, key: str) -> int:
        """The number of values in the queue `key`."""
        raise _absent(self, "queue_len")

    def barrier(self, name: str, num_members: int, timeout: Duration | None = None) -> None:
        """Return once `num_members` callers have called with this `name`; one round trip each.

        The name may be used again afterwards: the next `num_members` callers make the next barrier.
        """
        raise _absent(self, "barrier")

    def clone(self) -> Self:
        """The same store over a connection of its own, to be closed on its own."""
        raise _absent(self, "clone")

    def listener(self) -> Self:
        """The same store for a thread that mostly waits, to be closed on its own; listeners share a connection."""
        return self.clone()

    def close(self) -> None:
        """Let go of what this object holds (a connection, a server it started). Idempotent."""


def _absent(store: Store, method: str) -> NotImplementedError:
    return NotImplementedError(f"{method}: Not implemented. {type(store).__name__} has no such method: write one.")


def checked_store(operation: str, store: object) -> Store:
    """`store`, where it is one. Raises SettingError for torch's, which have the names of ours, and anything else."""
    if isinstance(store, Store):
        return store
    kind = type(store)
    raise SettingError(
        operation,
        f"store is {store if store is None else f'a {kind.__module__}.{kind.__name__}'}, which is none of disttrain's.",
        "Give a disttrain.TCPStore, FileStore, HashStore or PrefixStore, or one that derives from disttrain.Store.",
    )
