"""Frames of the store's client and server. No sockets here.

A frame is a 4-byte big-endian length and a msgpack array. A request is `[request_id, op, *arguments]`, its reply
`[request_id, status, value]`. Requests may be answered in any order; the id tells which, so several threads can wait on
a connection. A client that was cut off repeats, on its next connection, the requests without a reply: under the same
id, with `-op` in place of `op`.

msgpack: https://github.com/msgpack/msgpack/blob/master/spec.md. Application extension types are refused.
"""

from __future__ import annotations

import struct
from enum import IntEnum, unique
from typing import Any, Final, NoReturn

import msgpack

from disttrain.errors import StoreError

PROTOCOL_VERSION: Final = 4
HEADER_BYTES: Final = 4
HANDSHAKE_FRAME_BYTES: Final = 512
"""Largest frame that either side accepts before both have proved that they know the token."""

_LARGE_BYTES: Final = 1 << 20
_SIZE: Final = struct.Struct(">I").unpack_from
_SMALL_HEADERS: Final = tuple(size.to_bytes(HEADER_BYTES, "big") for size in range(256))

NOT_A_REQUEST: Final = -1
"""The request_id of a server's last words to a client that breaks the protocol."""

NEWS: Final = -2
"""The request_id of what a server says unasked: [NEWS, OK, the standby's [host, port] or None]."""

COUNTED: Final = -3
"""The request_id of a server's word that a BARRIER_EACH waits: [COUNTED, OK, its request_id]; nobody need hear it."""

Address = tuple[str, int]
"""Host and port."""

Message = list[Any]
Answer = tuple[int, Any]
"""(status, value), as a reply holds it."""


@unique
class Op(IntEnum):
    """Operations of a client; the comment shows the arguments."""

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
    LIST_KEYS = 13  # prefix
    QUEUE_PUSH = 14  # queue, value, capacity (0: any), timeout_s
    QUEUE_POP = 15  # queue, timeout_s (0: don't wait)
    QUEUE_LEN = 16  # queue
    WATCH = 17  # key, seen (None: no value), timeout_s
    CANCEL = 18  # request_id, to be forgotten
    LEAVE = 19  # nothing will be asked again; no reply
    FOLLOW = 20  # host, port, patience_s: be told all that changes, as the standby at this address
    ACK = 21  # num_entries, beat: how many entries have been applied; no reply
    ELECT = 22  # for_leader, for_standby: an elector and its sides; [term, asks], see `succession`
    ADD_EACH = 23  # keys, amounts: of clients that ask together, by a proxy; the total after each
    BARRIER_EACH = 24  # name, num_members, timeout_s, num_together: so many come together, by a proxy


READING: Final = frozenset(
    (Op.GET, Op.CHECK, Op.WAIT, Op.NUM_KEYS, Op.MULTI_GET, Op.LIST_KEYS, Op.QUEUE_LEN, Op.WATCH, Op.CANCEL)
)
"""Operations that change nothing, and so may be done twice."""


@unique
class Status(IntEnum):
    """Results of a request. Every status but OK comes with a sentence that says what was wrong."""

    OK = 0
    TIMEOUT = 1
    LIMIT = 2
    REFUSED = 3
    EMPTY = 4
    GONE = 5
    STANDBY = 6
    APART = 7
    """Nothing was done: those that asked together have to ask each on its own."""


class WireError(StoreError):
    """Bytes that are not a frame of this protocol, or a frame over its limit; the connection is of no further use."""


class Encoder:
    """Turns messages into frames, with one buffer for all of them. Any thread may call `encode`."""

    __slots__ = ("_pack",)

    def __init__(self) -> None:
        self._pack = msgpack.Packer().pack

    def encode(self, message: Message | tuple[Any, ...]) -> bytes:
        """One frame. Raises WireError for what msgpack cannot carry (a lone surrogate, a huge integer)."""
        try:
            body: bytes = self._pack(message)
        except (ValueError, OverflowError, TypeError) as error:
            raise WireError("store", f"a message cannot be encoded: {_reason(error)}.") from None
        size = len(body)
        if size < 256:
            return _SMALL_HEADERS[size] + body
        if size > _LARGE_BYTES:
            # The packer would keep a buffer of this size for good.
            self._pack = msgpack.Packer().pack
            if size >> 32:
                raise WireError("store", f"a message has {size} bytes; a frame's length has 32 bits.")
        return size.to_bytes(HEADER_BYTES, "big") + body


def encode(message: Message | tuple[Any, ...]) -> bytes:
    """One frame, by an encoder of its own; see `Encoder.encode`."""
    return Encoder().encode(message)


class Decoder:
    """Turns a stream of bytes, however it was cut, into messages."""

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self.num_missing_bytes = 0
        """The number of bytes, at least, that the frame that has begun still needs; 0: none has begun."""
        self._rest = bytearray()
        self._wanted_bytes = HEADER_BYTES

    def feed(self, data: bytes) -> list[Message]:
        """The messages that `data` completes. Raises WireError; afterwards the stream is of no further use."""
        # Nearly always exactly one whole frame arrives: it needs no buffer.
        size = len(data) - 4
        if 0 < size <= self.max_frame_bytes and not self._rest and _SIZE(data)[0] == size:
            try:
                message = msgpack.unpackb(data[4:], ext_hook=_refuse_extension)
            except (ValueError, TypeError) as error:
                raise _not_msgpack(size, error) from None
            return [message if type(message) is list else _refuse(message)]
        self._rest += data
        messages = self._split() if len(self._rest) >= self._wanted_bytes else []
        self.num_missing_bytes = self._wanted_bytes - len(self._rest) if self._rest else 0
        return messages

    def _split(self) -> list[Message]:
        messages = []
        start, size = 0, len(self._rest)
        with memoryview(self._rest) as view:
            while True:
                self._wanted_bytes = HEADER_BYTES
                first = start + HEADER_BYTES
                if first > size:
                    break
                (num_bytes,) = _SIZE(view, start)
                if num_bytes > self.max_frame_bytes:
                    raise self._too_large(num_bytes)
                end = first + num_bytes
                if end > size:
                    self._wanted_bytes += num_bytes
                    break
                messages.append(_message(view[first:end]))
                start = end
        del self._rest[:start]
        return messages

    def _too_large(self, num_bytes: int) -> WireError:
        return WireError(
            "store",
            f"a frame says that it has {num_bytes} bytes; the limit here is {self.max_frame_bytes}.",
            "Either the frame is too large, or the other side does not speak the store's protocol.",
        )


def _message(body: memoryview) -> Message:
    try:
        message = msgpack.unpackb(body, ext_hook=_refuse_extension)
    except (ValueError, TypeError) as error:
        raise _not_msgpack(len(body), error) from None
    return message if type(message) is list else _refuse(message)


def _not_msgpack(num_bytes: int, error: Exception) -> WireError:
    return WireError("store", f"a frame of {num_bytes} bytes is not msgpack: {_reason(error)}.")


def _refuse(message: object) -> NoReturn:
    raise WireError("store", f"a frame holds a {type(message).__name__}; it must be an array.")


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code} with {len(data)} bytes")


def _reason(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__
