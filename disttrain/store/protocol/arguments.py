"""Checks the arguments of a request. Whatever a client sends, the answer is a sentence and never a crash."""

from __future__ import annotations

from typing import NoReturn

from disttrain.store.protocol.answers import not_a_counter_text
from disttrain.store.protocol.limits import Limits, over_limit
from disttrain.store.protocol.wire import Status

_INT64_CHARS = 20


class Refusal(Exception):
    """Ends a request with a status and a sentence."""

    def __init__(self, status: Status, text: str) -> None:
        self.status = status
        self.text = text


def refuse(text: str) -> NoReturn:
    """End the request: what it asks for makes no sense."""
    raise Refusal(Status.REFUSED, text)


class Arguments:
    """The checks that depend on the server's limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._key_bytes = limits.key_bytes
        self._value_bytes = limits.value_bytes

    def check_key(self, key: str) -> None:
        """A key, or the name of a barrier or queue."""
        if type(key) is not str:
            refuse(f"a key is a str, not {type(key).__name__}.")
        if 4 * len(key) <= self._key_bytes:
            return
        num_bytes = len(key.encode(errors="surrogatepass"))
        if num_bytes > self._key_bytes:
            self.over(f"the key {key[:32]!r}...", num_bytes, "key_bytes")

    def check_keys(self, keys: list[str]) -> None:
        """Any number of keys."""
        if type(keys) is not list:
            refuse(f"keys come as a list, not {type(keys).__name__}.")
        for key in keys:
            if type(key) is not str or 4 * len(key) > self._key_bytes:
                self.check_key(key)

    def check_value(self, key: str, value: bytes) -> None:
        """A value, for `key`."""
        if type(value) is not bytes:
            refuse(f"the value of key {key!r} is bytes, not {type(value).__name__}.")
        if len(value) > self._value_bytes:
            self.over(f"the value of key {key!r}", len(value), "value_bytes")

    def check_values(self, keys: list[str], values: list[bytes]) -> None:
        """A value for each of the keys."""
        for key, value in zip(keys, values, strict=True):
            if type(value) is not bytes or len(value) > self._value_bytes:
                self.check_value(key, value)

    def over(self, subject: str, count: int, limit: str) -> NoReturn:
        """End the request: it is over the limit named `limit`."""
        raise Refusal(Status.LIMIT, over_limit(subject, count, limit, self._limits))


def counter(key: str, text: bytes) -> int:
    """The value of `key` as a number."""
    if len(text) <= _INT64_CHARS:
        try:
            return int(text)
        except ValueError:
            pass
    refuse(not_a_counter_text(key))


def checked_timeout(timeout_s: float) -> float:
    """A time to wait."""
    # The comparison is false for NaN as well.
    if type(timeout_s) not in (int, float) or not 0 < timeout_s < float("inf"):
        refuse(f"a timeout is a positive number of seconds, not {shown(timeout_s)}.")
    return timeout_s


def shown(value: object) -> str:
    """A value that a client sent where a number belongs; what is deep or long is not shown."""
    return repr(value) if type(value) in (int, float) else f"a {type(value).__name__}"
