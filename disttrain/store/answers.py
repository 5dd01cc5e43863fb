"""What the stores say when they cannot do what was asked: one wording, whoever holds the keys."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from disttrain.errors import StoreError, StoreLimitError, StoreQueueEmptyError, StoreTimeoutError
from disttrain.store.base import Value
from disttrain.store.wire import Answer, Op, Status

NUM_NAMED_KEYS: Final = 8


def missing_text(missing: Collection[str], num_keys: int, timeout_s: float) -> str:
    """The problem when a wait for `num_keys` keys is over and `missing` have not come."""
    if num_keys == 1:
        return f"key {next(iter(missing))!r} did not come within {timeout_s:g} s."
    named = ", ".join(repr(key) for key in sorted(missing)[:NUM_NAMED_KEYS])
    more = f" and {len(missing) - NUM_NAMED_KEYS} more" if len(missing) > NUM_NAMED_KEYS else ""
    return f"{len(missing)} of {num_keys} keys did not come within {timeout_s:g} s: {named}{more}."


def barrier_text(name: str, num_came: int, num_members: int, timeout_s: float) -> str:
    """The problem when a barrier's members did not all come."""
    return f"{num_came} of {num_members} members came to barrier {name!r} within {timeout_s:g} s."


def mismatch_text(name: str, num_members: int, num_members_elsewhere: int) -> str:
    """The problem when callers of one barrier don't agree on its size."""
    return f"barrier {name!r} waits for {num_members_elsewhere} members; this caller says {num_members}."


def watch_text(key: str, timeout_s: float) -> str:
    """The problem when a watched key did not change."""
    return f"the value of key {key!r} did not change within {timeout_s:g} s."


def queue_text(name: str, is_push: bool, timeout_s: float) -> str:
    """The problem when a queue stayed full, or empty."""
    return f"queue {name!r} stayed {'full' if is_push else 'empty'} for {timeout_s:g} s."


def empty_text(name: str) -> str:
    """The problem when there is nothing to take, and no wish to wait."""
    return f"queue {name!r} is empty."


def not_a_counter_text(key: str) -> str:
    """The problem when `add` meets a value that is no number."""
    return f"the value of key {key!r} is not a 64-bit decimal number."


def overflow_text(key: str) -> str:
    """The problem when a counter would leave the 64-bit range."""
    return f"the counter {key!r} would pass 64 bits."


_REMEDIES: Final = {
    Status.TIMEOUT: "See whether whoever should set it is alive, uses the same key, or needs a longer timeout.",
    Status.LIMIT: "Store less under one key, or raise the limit where the server is started.",
    Status.REFUSED: "",
    Status.EMPTY: "Pass block=True to wait for a value.",
}
_TIMEOUT_REMEDIES: Final[dict[int, str]] = {
    Op.BARRIER: "See whether the others are alive and call it with the same name.",
    Op.QUEUE_PUSH: "See whether whoever should take from it is alive, or needs a longer timeout.",
    Op.WATCH: "See whether whoever should change it is alive, or needs a longer timeout.",
}
_ERRORS: Final[dict[int, type[StoreError]]] = {
    Status.TIMEOUT: StoreTimeoutError,
    Status.LIMIT: StoreLimitError,
    Status.REFUSED: StoreError,
    Status.EMPTY: StoreQueueEmptyError,
}


def error_of(op: Op, answer: Answer, where: str) -> StoreError:
    """The error that stands for an answer whose status is not OK."""
    status, text = answer
    if status not in _ERRORS:
        return StoreError(op.name.lower(), f"the store answered with an unknown status {status!r}.", where=where)
    remedy = _REMEDIES[Status(status)]
    if status == Status.TIMEOUT:
        remedy = _TIMEOUT_REMEDIES.get(op, remedy)
    return _ERRORS[status](op.name.lower(), str(text), remedy, where=where)


def to_keys(operation: str, keys: Sequence[str]) -> list[str]:
    """Keys as a list. Raises StoreError for a lone str, which would be taken for the list of its letters."""
    if isinstance(keys, str):
        raise StoreError(operation, f"keys is the str {keys!r}; it must be a list of them.", f"Pass [{keys!r}].")
    return list(keys)


def checked_pairs(keys: Sequence[str], values: Sequence[Value]) -> tuple[list[str], list[bytes]]:
    """Both as lists, values as bytes. Raises StoreError when they are not equally many."""
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
