"""Keys, values and capacities as callers give them, and as they travel."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.errors import StoreError

Value = bytes | str
"""A value of a store; a str is stored as its UTF-8 bytes."""


def to_keys(operation: str, keys: Sequence[str]) -> list[str]:
    """Keys as a list. Raises StoreError for a lone str, which would be taken for the list of its letters."""
    if isinstance(keys, str):
        raise StoreError(operation, f"keys is the str {keys!r}; it must be a list of them.", f"Pass [{keys!r}].")
    return list(keys)


def checked_pairs(keys: Sequence[str], values: Sequence[Value]) -> tuple[list[str], list[bytes]]:
    """Keys and values as lists, values as bytes. Raises StoreError when they are not equally many."""
    key_list, value_list = to_keys("multi_set", keys), [to_bytes(value) for value in values]
    if len(key_list) != len(value_list):
        raise StoreError("multi_set", f"there are {len(key_list)} keys and {len(value_list)} values.", "Give one each.")
    return key_list, value_list


def checked_capacity(capacity: int | None) -> int:
    """A queue's capacity as it travels: 0 for any. Raises StoreError unless it is None or positive."""
    if capacity is not None and capacity < 1:
        raise StoreError(
            "queue_push", f"capacity is {capacity}; a queue holds at least 1.", "Pass None for any number."
        )
    return capacity or 0


def to_bytes(value: object) -> bytes:
    """A value as the store keeps it. Raises StoreError for anything but bytes and str."""
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise StoreError("set", f"the value is not valid Unicode: {error}.", "Encode it yourself.") from None
    raise StoreError("set", f"the value is a {type(value).__name__}; a store keeps bytes or str.", "Encode it first.")
