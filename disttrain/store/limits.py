"""How much a store's server takes from its clients, and what it says when one asks for more."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """Bytes of one key, one value, one frame, and of the replies that a client has not read yet.

    A NamedTuple, not a dataclass: `dataclasses` alone would be a tenth of the server's start-up time.
    """

    key_bytes: int = 8 << 10
    value_bytes: int = 64 << 20
    frame_bytes: int = 256 << 20
    unread_bytes: int = 512 << 20


SETTING_OF = {
    "key_bytes": "DISTTRAIN_STORE_MAX_KEY_BYTES",
    "value_bytes": "DISTTRAIN_STORE_MAX_VALUE_BYTES",
    "frame_bytes": "DISTTRAIN_STORE_MAX_FRAME_BYTES",
    "unread_bytes": "DISTTRAIN_STORE_MAX_UNREAD_BYTES",
}


def over_limit(what: str, num_bytes: int, limit: str, limits: Limits) -> str:
    """The sentence for something of `num_bytes` that is over the limit named `limit`."""
    return f"{what} has {num_bytes} bytes; the limit is {getattr(limits, limit)} ({SETTING_OF[limit]})."
