"""A store seen through a prefix, so that its users do not have to know each other's keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from disttrain.errors import StoreError
from disttrain.store.base import Store, checked_store
from disttrain.store.durations import Duration
from disttrain.store.protocol.values import Value, to_bytes, to_keys


class PrefixStore(Store):
    """`store` with `prefix/` before each key and barrier name. Satisfies `Store`; prefixes nest.

    `num_keys` and the timeout are the whole store's. Closing it leaves `store` open, except in a clone, which holds a
    clone of `store` of its own.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        self.prefix = prefix
        self.underlying_store = checked_store("PrefixStore", store)
        self._owns_store = False

    @property
    def timeout_s(self) -> float:
        """Seconds that an operation waits unless told otherwise."""
        return self.underlying_store.timeout_s

    @property
    def _underlying_non_prefix_store(self) -> Store:
        """torch's name for the store below all prefixes."""
        inner = self.underlying_store
        return inner._underlying_non_prefix_store if isinstance(inner, PrefixStore) else inner

    def has_extended_api(self) -> bool:
        """As `has_extended_api` of the whole store."""
        return self.underlying_store.has_extended_api()

    def set_timeout(self, timeout: Duration) -> None:
        """Change `timeout_s`, for the whole store."""
        self.underlying_store.set_timeout(timeout)

    def set(self, key: str, value: Value) -> None:
        """See `Store.set`."""
        self.underlying_store.set(self._named(key), to_bytes(value))

    def get(self, key: str) -> bytes:
        """See `Store.get`."""
        return self.underlying_store.get(self._named(key))

    def add(self, key: str, amount: int) -> int:
        """See `Store.add`."""
        return self.underlying_store.add(self._named(key), amount)

    def append(self, key: str, value: Value) -> None:
        """See `Store.append`."""
        self.underlying_store.append(self._named(key), to_bytes(value))

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """See `Store.compare_set`."""
        return self.underlying_store.compare_set(self._named(key), to_bytes(expected), to_bytes(desired))

    def check(self, keys: Sequence[str]) -> bool:
        """See `Store.check`."""
        return self.underlying_store.check(self._all_named("check", keys))

    def wait(self, keys: Sequence[str], timeout: Duration | None = None) -> None:
        """See `Store.wait`."""
        self.underlying_store.wait(self._all_named("wait", keys), timeout)

    def watch(self, key: str, seen: Value | None, timeout: Duration | None = None) -> bytes | None:
        """See `Store.watch`."""
        return self.underlying_store.watch(self._named(key), seen, timeout)

    def delete_key(self, key: str) -> bool:
        """See `Store.delete_key`."""
        return self.underlying_store.delete_key(self._named(key))

    def num_keys(self) -> int:
        """The number of keys of the whole store."""
        return self.underlying_store.num_keys()

    def list_keys(self, prefix: str = "") -> list[str]:
        """See `Store.list_keys`: of the keys under our prefix, without it."""
        num_chars = len(self._named(""))
        return [key[num_chars:] for key in self.underlying_store.list_keys(self._named(prefix))]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """See `Store.multi_get`."""
        return self.underlying_store.multi_get(self._all_named("multi_get", keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """See `Store.multi_set`."""
        self.underlying_store.multi_set(self._all_named("multi_set", keys), [to_bytes(value) for value in values])

    def queue_push(self, key: str, value: Value, capacity: int | None = None, timeout: Duration | None = None) -> None:
        """See `Store.queue_push`."""
        self.underlying_store.queue_push(self._named(key), to_bytes(value), capacity, timeout)

    def queue_pop(self, key: str, block: bool = True, timeout: Duration | None = None) -> bytes:
        """See `Store.queue_pop`."""
        return self.underlying_store.queue_pop(self._named(key), block, timeout)

    def queue_len(self, key: str) -> int:
        """See `Store.queue_len`."""
        return self.underlying_store.queue_len(self._named(key))

    def barrier(self, name: str, num_members: int, timeout: Duration | None = None) -> None:
        """See `Store.barrier`."""
        self.underlying_store.barrier(self._named(name), num_members, timeout)

    def clone(self) -> Self:
        """The same prefix over a clone of the store."""
        return type(self)(self.prefix, self.underlying_store.clone()).owning()

    def listener(self) -> Self:
        """The same prefix over a listener of the store."""
        return type(self)(self.prefix, self.underlying_store.listener()).owning()

    def owning(self) -> Self:
        """Itself; `close` closes the store below, too, which nobody else uses."""
        self._owns_store = True
        return self

    def close(self) -> None:
        """Close the store below if it is our own. Idempotent."""
        if self._owns_store:
            self.underlying_store.close()

    def _named(self, key: str) -> str:
        if not isinstance(key, str):
            raise StoreError("PrefixStore", f"a key is a str, not {type(key).__name__}.", "Pass its name.")
        return f"{self.prefix}/{key}"

    def _all_named(self, operation: str, keys: Sequence[str]) -> list[str]:
        return [self._named(key) for key in to_keys(operation, keys)]
