"""Frames: whatever was encoded comes out again however the bytes were cut; whatever was not is refused."""

from __future__ import annotations

import itertools
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain.store.protocol.wire import Decoder, Op, WireError, encode

LIMIT = 1 << 16
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=9)
    | st.binary(max_size=9)
)
messages = st.lists(leaves | st.lists(leaves, max_size=2), max_size=4)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in itertools.pairwise(edges)]


@given(st.lists(messages, max_size=3), st.lists(st.integers(0, 10_000), max_size=12))
def test_messages_survive_any_cutting(sent: list[list[Any]], places: list[int]) -> None:
    decoder = Decoder(LIMIT)
    received = [message for piece in cut(b"".join(map(encode, sent)), places) for message in decoder.feed(piece)]
    assert received == sent
    assert decoder.num_missing_bytes == 0


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_garbage_gives_messages_or_a_wire_error(pieces: list[bytes]) -> None:
    decoder = Decoder(64)
    try:
        for piece in pieces:
            assert all(type(message) is list for message in decoder.feed(piece))
            assert 0 <= decoder.num_missing_bytes <= 64
    except WireError:
        return


@given(st.binary(max_size=200))
def test_a_frame_of_garbage_never_raises_anything_else(body: bytes) -> None:
    try:
        (message,) = Decoder(LIMIT).feed(len(body).to_bytes(4, "big") + body)
    except WireError:
        return
    assert type(message) is list


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "incomplete"),
        (b"\xc1", "not msgpack"),
        (b"\x93\x01", "max_array_len"),
        (b"\x90\x90", "extra data"),
        (b"\xa1\xff", "utf-8"),
        (b"\x91" * 5000 + b"\xc0", "not msgpack"),
        (b"\xdd\xff\xff\xff\xff", "max_array_len"),
        (msgpack.packb([msgpack.ExtType(5, b"x")]), "extension type 5"),
        (msgpack.packb({"a": 1}), "holds a dict"),
        (msgpack.packb(7), "holds a int"),
    ],
)
def test_each_kind_of_bad_frame_says_what_is_wrong(body: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        Decoder(LIMIT).feed(len(body).to_bytes(4, "big") + body)


def test_an_oversized_frame_is_refused_by_its_header_alone() -> None:
    with pytest.raises(WireError, match="has 1195725856 bytes; the limit here is 100"):
        Decoder(100).feed(b"GET / HTTP/1.1\r\n"[:4])


def test_a_frame_of_exactly_the_limit_passes() -> None:
    frame = encode([b"x" * 95])
    assert len(frame) - 4 == 98
    assert Decoder(98).feed(frame) == [[b"x" * 95]]
    with pytest.raises(WireError):
        Decoder(97).feed(frame)


@pytest.mark.parametrize("content", ["\ud800", 2**64, object()])
def test_what_msgpack_cannot_carry_is_a_wire_error(content: object) -> None:
    with pytest.raises(WireError, match="cannot be encoded"):
        encode([1, content])


def test_operations_travel_as_small_integers() -> None:
    assert encode((3, Op.SET, "k", b"v")) == b"\x00\x00\x00\x08\x94\x03\x01\xa1k\xc4\x01v"
