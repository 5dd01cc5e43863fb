"""Limits on what clients may ask of a store's server, and the sentence for a request that exceeds one."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """Bytes of one key, one value, one frame, and of the replies that a client has not read yet; then totals.

    `num_keys` counts the values of queues too, `total_bytes` is that of all keys and values together. `num_unproved` is
    of connections that have not proved yet that they know the token, `num_clients` of those that have.

    A NamedTuple, not a dataclass: `dataclasses` alone would be a tenth of the server's start-up time.
    """

    key_bytes: int = 8 << 10
    value_bytes: int = 64 << 20
    frame_bytes: int = 256 << 20
    unread_bytes: int = 512 << 20
    num_keys: int = 10_000_000
    num_clients: int = 100_000
    total_bytes: int = 8 << 30
    num_unproved: int = 4096


SETTING_OF = {
    "key_bytes": "DISTTRAIN_STORE_MAX_KEY_BYTES",
    "value_bytes": "DISTTRAIN_STORE_MAX_VALUE_BYTES",
    "frame_bytes": "DISTTRAIN_STORE_MAX_FRAME_BYTES",
    "unread_bytes": "DISTTRAIN_STORE_MAX_UNREAD_BYTES",
    "num_keys": "DISTTRAIN_STORE_MAX_KEYS",
    "num_clients": "DISTTRAIN_STORE_MAX_CLIENTS",
    "total_bytes": "DISTTRAIN_STORE_MAX_TOTAL_BYTES",
    "num_unproved": "DISTTRAIN_STORE_MAX_UNPROVED",
}


def over_limit(subject: str, count: int, limit: str, limits: Limits) -> str:
    """The sentence for something of so many keys, clients or bytes that is over the limit named `limit`."""
    unit = limit.removeprefix("num_") if limit.startswith("num_") else "bytes"
    return f"{subject} has {count} {unit}; the limit is {getattr(limits, limit)} ({SETTING_OF[limit]})."
