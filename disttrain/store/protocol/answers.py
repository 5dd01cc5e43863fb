"""Sentences for requests that a store cannot serve: one wording, whoever holds the keys."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from disttrain.errors import StoreError, StoreLimitError, StoreQueueEmptyError, StoreTimeoutError
from disttrain.store.protocol.wire import Answer, Op, Status

NUM_NAMED_KEYS: Final = 8


def missing_text(missing: Collection[str], num_keys: int, timeout_s: float) -> str:
    """The problem when a wait for `num_keys` keys is over and `missing` have not come."""
    # The words in brackets are torch's: programs look for them.
    keys = sorted(missing)[:NUM_NAMED_KEYS]
    words = f"wait timeout after {timeout_s * 1e3:.0f}ms, keys: {', '.join(f'/{key}' for key in keys)}"
    if num_keys == 1:
        return f"key {keys[0]!r} did not come within {timeout_s:g} s ({words})."
    named = ", ".join(repr(key) for key in keys)
    more = f" and {len(missing) - NUM_NAMED_KEYS} more" if len(missing) > NUM_NAMED_KEYS else ""
    return f"{len(missing)} of {num_keys} keys did not come within {timeout_s:g} s: {named}{more} ({words})."


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
