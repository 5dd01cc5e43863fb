"""The job's token: files, the handshake of both sides, and a hub that strangers talk to. No sockets."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain.errors import StoreAuthError, StoreConnectionError
from disttrain.store.protocol.auth import NONCE_BYTES, client_proof, new_token, read_token, server_proof, write_token
from disttrain.store.protocol.handshake import ClientHandshake, ServerHandshake
from disttrain.store.protocol.limits import Limits
from disttrain.store.protocol.wire import PROTOCOL_VERSION, Decoder, Op, Status, encode
from disttrain.store.serving.hub import HANDSHAKE_S, Hub

TOKEN = "0123456789abcdef0123456789abcdef"
FRAME_BYTES = 1000


def test_a_token_file_is_ours_alone_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = write_token(path)
    assert len(token) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_token(path) == token
    assert new_token() != new_token()


def test_an_existing_token_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_token(path, TOKEN)
    with pytest.raises(StoreAuthError, match="exists already"):
        write_token(path)
    assert read_token(path) == TOKEN


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
def test_a_token_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    write_token(path)
    path.chmod(mode)
    with pytest.raises(StoreAuthError, match=f"mode {mode:04o}.*chmod 600"):
        read_token(path)


@pytest.mark.parametrize("content", [b"", b"short", b"with space in between it", b"\xff" * 40, "ü".encode() * 20])
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(StoreAuthError):
        read_token(path)


def test_a_pipe_is_no_token_file_and_holds_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token", 0o600)
    with pytest.raises(StoreAuthError, match="token is not a regular file"):
        read_token(tmp_path / "token")


def test_a_missing_token_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(StoreAuthError, match="write_token"):
        read_token(tmp_path / "none")


def shake(server: ServerHandshake, client: ClientHandshake) -> int:
    return client.conclude(server.verdict(client.answer(server.hello()), FRAME_BYTES))


@pytest.mark.parametrize("token", [None, TOKEN])
def test_both_sides_agree(token: str | None) -> None:
    assert shake(ServerHandshake(token), ClientHandshake(token, "here")) == FRAME_BYTES


@pytest.mark.parametrize(
    ("server_token", "client_token", "reason"),
    [
        (TOKEN, TOKEN[::-1], "not the server's"),
        (TOKEN, None, "asks for the job's token and we have none"),
        (None, TOKEN, "cannot prove that it belongs"),
    ],
)
def test_sides_that_do_not_agree(server_token: str | None, client_token: str | None, reason: str) -> None:
    with pytest.raises(StoreAuthError, match=reason):
        shake(ServerHandshake(server_token), ClientHandshake(client_token, "here"))


def test_a_server_that_does_not_know_the_token_is_found_out() -> None:
    client = ClientHandshake(TOKEN, "here")
    client.answer(ServerHandshake(new_token()).hello())
    for proof in (b"", b"\0" * 32, None, 5):
        with pytest.raises(StoreAuthError, match="could not prove"):
            client.conclude([0, proof, FRAME_BYTES, b"session", None])


def test_an_answer_cannot_be_replayed() -> None:
    answer = ClientHandshake(TOKEN, "here").answer((first := ServerHandshake(TOKEN)).hello())
    assert first.verdict(answer, FRAME_BYTES)[0] == Status.OK
    assert ServerHandshake(TOKEN).verdict(answer, FRAME_BYTES)[0] == Status.REFUSED


def test_an_answer_cannot_be_reflected() -> None:
    client = ClientHandshake(TOKEN, "here")
    answer = client.answer(ServerHandshake(TOKEN).hello())
    with pytest.raises(StoreAuthError, match="could not prove"):
        client.conclude([0, answer[2], FRAME_BYTES, b"session", None])
    nonces = b"a" * NONCE_BYTES, b"b" * NONCE_BYTES
    assert client_proof(TOKEN, *nonces) != server_proof(TOKEN, *nonces)
    assert client_proof(TOKEN, *nonces) != client_proof(TOKEN, *reversed(nonces))


@pytest.mark.parametrize(
    "answer",
    [
        [],
        [PROTOCOL_VERSION],
        [PROTOCOL_VERSION, b"", b"", b"", 0],
        [PROTOCOL_VERSION, b"x" * 32, "text", b"", 0],
        [PROTOCOL_VERSION, b"x" * 32, b"", 7, 0],
        [PROTOCOL_VERSION, b"x" * 32, b"", b"", "0"],
        ["2", b"", b"", b""],
        [99, b"", b"", b""],
    ],
)
def test_bad_answers_are_refused(answer: list[Any]) -> None:
    assert ServerHandshake(TOKEN).verdict(answer, FRAME_BYTES)[0] == Status.REFUSED


def test_a_stranger_and_another_version_are_told_apart() -> None:
    with pytest.raises(StoreConnectionError, match="not a disttrain store"):
        ClientHandshake(None, "here").answer(["SSH-2.0", 1, b""])
    with pytest.raises(StoreAuthError, match="Use the same disttrain"):
        ClientHandshake(None, "here").answer(["disttrain store", PROTOCOL_VERSION + 1, b""])


def joined(hub: Hub, connection: int, now_s: float = 0.0) -> None:
    """Connect and shake hands as a client that knows the token would."""
    ((_, hello, _),) = hub.connected(connection, now_s)
    client = ClientHandshake(TOKEN, "here")
    answer = client.answer(Decoder(512).feed(hello)[0])
    ((_, verdict, reason),) = hub.received(connection, encode(answer), now_s)
    assert reason == ""
    assert client.conclude(Decoder(512).feed(verdict)[0]) == hub.limits.frame_bytes


def test_nothing_happens_before_the_proof() -> None:
    hub = Hub(TOKEN)
    hub.connected(1, 0.0)
    ((_, verdict, reason),) = hub.received(1, encode([1, Op.SET, "key", b"value"]), 0.0)
    assert reason != ""
    assert Decoder(512).feed(verdict)[0][0] == Status.REFUSED
    assert hub.received(1, encode([2, Op.SET, "key", b"value"]), 0.0) == []
    joined(hub, 2)
    ((_, reply, _),) = hub.received(2, encode([1, Op.NUM_KEYS]), 0.0)
    assert Decoder(512).feed(reply) == [[1, 0, 0]]
    assert hub.num_clients == 1


def test_frames_sent_along_with_the_answer_are_refused() -> None:
    hub = Hub(TOKEN)
    ((_, hello, _),) = hub.connected(1, 0.0)
    answer = ClientHandshake(TOKEN, "here").answer(Decoder(512).feed(hello)[0])
    ((_, data, reason),) = hub.received(1, encode(answer) + encode([1, Op.NUM_KEYS]), 0.0)
    assert (data, reason) == (b"", "more than one frame before authentication")


def test_a_large_frame_before_the_proof_is_refused_by_its_header() -> None:
    hub = Hub(TOKEN)
    hub.connected(1, 0.0)
    ((_, data, reason),) = hub.received(1, b"\0\0\x10\0", 0.0)
    assert data == b""
    assert "the limit here is 512" in reason


def test_silent_peers_have_five_seconds() -> None:
    hub = Hub(TOKEN)
    hub.connected(1, 0.0)
    joined(hub, 2, 1.0)
    hub.connected(3, 2.0)
    assert hub.next_deadline_s == HANDSHAKE_S == 5.0
    assert [action[0] for action in hub.tick(5.0)] == [1]
    assert [action[0] for action in hub.tick(7.0)] == [3]
    assert hub.next_deadline_s is None
    assert hub.num_clients == 1


def test_a_client_that_breaks_the_protocol_hears_why_and_leaves_nothing_behind() -> None:
    hub = Hub(TOKEN, Limits(frame_bytes=2000))
    joined(hub, 1)
    joined(hub, 2)
    assert hub.received(1, encode([1, Op.BARRIER, "go", 2, 9]), 0.0) == []
    ((_, last_words, reason),) = hub.received(1, b"GET / HTTP/1.1", 0.0)
    assert Decoder(512).feed(last_words) == [[-1, Status.REFUSED, reason]]
    assert hub.state.num_parked == 0
    assert hub.received(2, encode([1, Op.BARRIER, "go", 2, 9]), 0.0) == []


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 3), st.binary(max_size=60)), max_size=10))
def test_no_bytes_of_strangers_reach_the_state(pieces: list[tuple[int, bytes]]) -> None:
    hub = Hub(TOKEN)
    for connection in (1, 2, 3):
        hub.connected(connection, 0.0)
    for connection, data in pieces:
        hub.received(connection, data, 0.0)
    assert hub.num_clients == 0
    assert hub.state.num_parked == 0
