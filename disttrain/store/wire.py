"""Frames: how the store's client and server talk. No sockets here.

A frame is a 4-byte big-endian length and a msgpack array. A request is `[request_id, op, *arguments]`, its reply
`[request_id, status, value]`. Requests may be answered in any order; the id says which is which.

msgpack: https://github.com/msgpack/msgpack/blob/master/spec.md. Application extension types are refused.
"""

from __future__ import annotations

from enum import IntEnum, unique
from typing import Any, Final

import msgpack

from disttrain.errors import StoreError

PROTOCOL_VERSION: Final = 1
HEADER_BYTES: Final = 4
HANDSHAKE_FRAME_BYTES: Final = 512
"""Largest frame that either side accepts before both have proved that they know the token."""

Message = list[Any]
Answer = tuple[int, Any]
"""(status, value), as a reply holds it."""


@unique
class Op(IntEnum):
    """What a client may ask; the comment shows the arguments."""

    SET = 1  # key, value
    GET = 2  # key, timeout_s
    ADD = 3  # key, amount
    APPEND = 4  # key, value
    COMPARE_SET = 5  # key, expected, desired
    CHECK = 6  # keys
    WAIT = 7  # keys, timeout_s
    DELETE_KEY = 8  # key
    NUM_KEYS = 9  #
    MULTI_GET = 10  # keys, timeout_s
    MULTI_SET = 11  # keys, values
    BARRIER = 12  # name, num_members, timeout_s


@unique
class Status(IntEnum):
    """How an answer ended. Every status but OK comes with a sentence that says what was wrong."""

    OK = 0
    TIMEOUT = 1
    LIMIT = 2
    REFUSED = 3


class WireError(StoreError):
    """Bytes that are not a frame of this protocol, or a frame over its limit; the connection is of no further use."""


def encode(message: Message | tuple[Any, ...]) -> bytes:
    """One frame. Raises WireError when `message` holds what msgpack cannot carry (a lone surrogate, a huge integer)."""
    try:
        body: bytes = msgpack.packb(message)
    except (ValueError, OverflowError, TypeError) as error:
        raise WireError("store", f"a message cannot be encoded: {_reason(error)}.") from None
    if len(body) >> 32:
        raise WireError("store", f"a message has {len(body)} bytes; a frame's length has 32 bits.")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class Decoder:
    """Turns a stream of bytes, however it was cut, into messages."""

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._rest = bytearray()
        self._wanted_bytes = HEADER_BYTES

    @property
    def num_unread_bytes(self) -> int:
        """Bytes of a frame that has begun and not ended."""
        return len(self._rest)

    def feed(self, data: bytes) -> list[Message]:
        """The messages that `data` completes. Raises WireError; afterwards the stream is of no further use."""
        if not self._rest:
            # Nearly always exactly one whole frame arrives: it needs no buffer.
            size = int.from_bytes(data[:HEADER_BYTES], "big")
            if len(data) == HEADER_BYTES + size and HEADER_BYTES < len(data) <= self.max_frame_bytes:
                return [_message(data[HEADER_BYTES:])]
        self._rest += data
        if len(self._rest) < self._wanted_bytes:
            return []
        return self._split()

    def _split(self) -> list[Message]:
        messages = []
        start = 0
        with memoryview(self._rest) as view:
            while True:
                self._wanted_bytes = HEADER_BYTES
                if len(view) - start < HEADER_BYTES:
                    break
                self._wanted_bytes += self._frame_size(view[start : start + HEADER_BYTES])
                if len(view) - start < self._wanted_bytes:
                    break
                messages.append(_message(view[start + HEADER_BYTES : start + self._wanted_bytes]))
                start += self._wanted_bytes
        del self._rest[:start]
        return messages

    def _frame_size(self, header: memoryview) -> int:
        size = int.from_bytes(header, "big")
        if size > self.max_frame_bytes:
            raise WireError(
                "store",
                f"a frame says that it has {size} bytes; the limit here is {self.max_frame_bytes}.",
                "Either the frame is too large, or the other side does not speak the store's protocol.",
            )
        return size


def _message(body: bytes | memoryview) -> Message:
    try:
        message = msgpack.unpackb(body, ext_hook=_refuse_extension)
    except (ValueError, TypeError) as error:
        raise WireError("store", f"a frame of {len(body)} bytes is not msgpack: {_reason(error)}.") from None
    if type(message) is not list:
        raise WireError("store", f"a frame holds a {type(message).__name__}; it must be an array.")
    return message


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code} with {len(data)} bytes")


def _reason(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__
