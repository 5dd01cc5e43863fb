"""What peers that prove nothing can cost a server: a bounded number of connections, bytes and lines. No sockets."""

from __future__ import annotations

import os
import select

import pytest

from disttrain.store.protocol.handshake import ClientHandshake
from disttrain.store.protocol.limits import Limits
from disttrain.store.protocol.wire import HANDSHAKE_FRAME_BYTES, Decoder, encode
from disttrain.store.serving.hub import HANDSHAKE_S, Hub
from disttrain.store.serving.log import MAX_LINES, PERIOD_S, Log

TOKEN = "0123456789abcdef0123456789abcdef"


def proof(hello: bytes) -> bytes:
    return encode(ClientHandshake(TOKEN, "here").answer(Decoder(512).feed(hello)[0]))


def test_of_too_many_strangers_the_oldest_is_dropped() -> None:
    hub = Hub(TOKEN, Limits(num_unproved=3))
    for connection in (1, 2, 3):
        assert [action[0] for action in hub.connected(connection, 0.0)] == [connection]
    actions = hub.connected(4, 1.0)
    assert [(connection, data != b"") for connection, data, _ in actions] == [(4, True), (1, False)]
    assert actions[1][2] == "3 later peers have not proved either that they know the token"
    hub.disconnected(1, 1.0)
    assert hub.next_deadline_s == HANDSHAKE_S
    assert [action[0] for action in hub.tick(HANDSHAKE_S)] == [2, 3]
    assert hub.next_deadline_s == 1.0 + HANDSHAKE_S


def test_the_time_in_which_the_server_was_frozen_does_not_count() -> None:
    hub = Hub(TOKEN)
    ((_, hello, _),) = hub.connected(1, 0.0)
    hub.connected(2, 1.0)
    assert hub.tick(HANDSHAKE_S + 10.0) == []
    assert hub.next_deadline_s == HANDSHAKE_S + 20.0
    # The proof was there all the time.
    assert hub.received(1, proof(hello), HANDSHAKE_S + 10.0)[0][2] == ""
    assert hub.next_deadline_s == HANDSHAKE_S + 21.0
    assert [action[0] for action in hub.tick(HANDSHAKE_S + 21.0)] == [2]


def test_clients_are_not_among_them() -> None:
    hub = Hub(TOKEN, Limits(num_unproved=2))
    for connection in range(1, 6):
        ((_, hello, _),) = hub.connected(connection, 0.0)
        assert hub.received(connection, proof(hello), 0.0)[0][2] == ""
        assert hub.is_proved(connection)
    assert hub.num_clients == 5
    for connection in range(6, 100):
        hub.connected(connection, 0.0)
        assert not hub.is_proved(connection)
    assert hub.num_clients == 5


def test_those_that_left_are_not_counted() -> None:
    hub = Hub(TOKEN, Limits(num_unproved=2))
    for connection in range(1, 50):
        assert len(hub.connected(connection, 0.0)) == 1
        hub.disconnected(connection, 0.0)
    assert hub.next_deadline_s is None


def test_a_client_comes_in_while_strangers_pour_in() -> None:
    hub = Hub(TOKEN, Limits(num_unproved=100))
    for connection in range(1, 10_000):
        hub.connected(connection, 0.0)
    ((_, hello, _), (dropped, _, _)) = hub.connected(10_000, 0.0)
    assert dropped == 10_000 - 100
    for connection in range(10_001, 10_100):
        hub.connected(connection, 0.0)
    assert hub.received(10_000, proof(hello), 0.0)[0][2] == ""
    assert hub.is_proved(10_000)


@pytest.mark.parametrize("frame", [b"\0\0\0\1\x90", b"\0\0\0\0"])
def test_many_small_frames_are_not_even_decoded(frame: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(TOKEN)
    hub.connected(1, 0.0)
    fed: list[bytes] = []
    monkeypatch.setattr(Decoder, "feed", lambda _decoder, data: fed.append(data))
    ((_, _, reason),) = hub.received(1, frame * 13_000, 0.0)
    assert reason == "more than one small frame before authentication"
    assert fed == []


def test_the_largest_frame_may_come_in_pieces_and_nothing_after_it() -> None:
    hub = Hub(TOKEN)
    hub.connected(1, 0.0)
    frame = HANDSHAKE_FRAME_BYTES.to_bytes(4, "big") + bytes(HANDSHAKE_FRAME_BYTES - 1)
    for byte in frame:
        assert hub.received(1, bytes([byte]), 0.0) == []
    ((_, _, reason),) = hub.received(1, b"\0\0", 0.0)
    assert reason == "more than one small frame before authentication"


def test_the_log_leaves_lines_out_and_says_so() -> None:
    reading, writing = os.pipe()
    log = Log(writing)
    for number in range(3 * MAX_LINES):
        log.say(f"line {number}", 0.0)
    log.say("later", PERIOD_S)
    os.close(writing)
    lines = os.read(reading, 1 << 16).decode().splitlines()
    os.close(reading)
    assert lines[:MAX_LINES] == [f"line {number}" for number in range(MAX_LINES)]
    assert lines[MAX_LINES:] == [f"disttrain store: {2 * MAX_LINES} lines were left out here", "later"]


def test_a_log_that_nobody_reads_holds_nobody() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    while select.select([], [writing], [], 0.0)[1]:
        os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    Log(writing).say("not written", 0.0)
    os.close(reading)
    Log(writing).say("not written either", 0.0)
    os.close(writing)
