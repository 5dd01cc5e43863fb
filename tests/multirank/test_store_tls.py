"""The store over TLS: who gets in, who gets which error, and what goes through."""

from __future__ import annotations

import importlib.util
import select
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from disttrain.errors import (
    SettingError,
    StoreAuthError,
    StoreConnectionError,
    StoreError,
    StoreLimitError,
    StoreTimeoutError,
)
from disttrain.store import Certificates, ServerProcess, TCPStore, new_token, spawn_server
from disttrain.store.tls.records import Tunnel, make_context
from disttrain.store.tls.socket import ClientTls
from tests.surroundings.authority import Authority

ENGINES = [engine for engine in ("pyuv", "uvloop") if importlib.util.find_spec(engine)]
LONG_S = 60.0
TOKEN = new_token()


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other-authority"))


@contextmanager
def serving(engine: str, certificates: Certificates | None) -> Iterator[ServerProcess]:
    server = spawn_server("127.0.0.1", 0, TOKEN, engine=engine, certificates=certificates)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def connected(
    server: ServerProcess, certificates: Certificates | None, timeout_s: float = LONG_S
) -> Iterator[TCPStore]:
    store = TCPStore(server.host, server.port, timeout=timeout_s, token=TOKEN, certificates=certificates)
    try:
        yield store
    finally:
        store.close()


def refused(server: ServerProcess, certificates: Certificates | None) -> str:
    """The error that a client with these certificates gets, long before its timeout."""
    started_s = time.monotonic()
    with pytest.raises(StoreError) as caught, connected(server, certificates, timeout_s=360.0):
        pass
    assert time.monotonic() - started_s < 50.0
    assert type(caught.value) is StoreAuthError
    return str(caught.value)


@pytest.mark.parametrize("asks_clients", [False, True])
def test_clients_get_in(engine: str, authority: Authority, asks_clients: bool) -> None:
    own = authority.issue() if asks_clients else authority.client_only
    with serving(engine, authority.issue(asks_clients=asks_clients)) as server, connected(server, own) as store:
        store.set("a", "1")
        clone = store.clone()
        assert clone.get("a") == b"1"
        store.close()
        assert clone.add("a", 1) == 2
        clone.set_timeout(0.05)
        with pytest.raises(StoreTimeoutError, match=r"get: key 'b' did not come within 0.05 s"):
            clone.get("b")
        clone.close()


def test_who_does_not_fit_gets_one_clear_error(engine: str, authority: Authority, other_authority: Authority) -> None:
    with serving(engine, authority.issue(asks_clients=True)) as server, connected(server, authority.issue()) as store:
        theirs = other_authority.issue()
        assert "the server's certificate is not one of the job's: " in refused(server, theirs)
        theirs = theirs._replace(ca_file=str(authority.file))
        assert "the server does not take us over TLS: unknown ca." in refused(server, theirs)
        assert "does not take us over TLS: certificate required." in refused(server, authority.client_only)
        expired = authority.issue(age=timedelta(days=9))
        assert "does not take us over TLS: certificate expired." in refused(server, expired)
        assert "the server speaks TLS only" in refused(server, None)
        with pytest.raises(StoreAuthError, match="token is not the server's"):
            TCPStore(server.host, server.port, token=new_token(), certificates=authority.issue(), timeout=LONG_S)
        assert store.num_keys() == 0


def test_a_server_that_does_not_fit_is_found_out(engine: str, authority: Authority) -> None:
    with serving(engine, authority.issue(age=timedelta(days=9))) as server:
        message = refused(server, authority.client_only)
        assert "the server's certificate is not one of the job's: certificate has expired." in message
        assert "See DISTTRAIN_STORE_TLS_CA" in message
    with serving(engine, None) as server, connected(server, None) as store:
        assert "the server does not speak TLS, and we speak nothing else." in refused(server, authority.client_only)
        assert store.num_keys() == 0


def test_older_versions_of_tls_are_not_spoken(engine: str, authority: Authority) -> None:
    old = ssl.create_default_context(cafile=str(authority.file))
    old.check_hostname = False
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        serving(engine, authority.issue()) as server,
        socket.create_connection((server.host, server.port), timeout=LONG_S) as connection,
        pytest.raises(ssl.SSLError, match=r"(?i)version"),
    ):
        old.wrap_socket(connection)


def test_what_listens_there_may_speak_neither(authority: Authority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        port = listener.getsockname()[1]
        asked = pool.submit(TCPStore, "127.0.0.1", port, timeout=0.5, certificates=authority.client_only)
        peer, _ = listener.accept()
        peer.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        with pytest.raises(StoreConnectionError, match=r"no store within 0.5 s: "):
            asked.result(LONG_S)
        peer.close()


@pytest.mark.parametrize("num_bytes", [0, 1, (16 << 10) - 1, 16 << 10, (16 << 10) + 1, 256 << 10, (1 << 20) + 7])
def test_values_of_every_size_come_back(num_bytes: int, engine: str, authority: Authority) -> None:
    value = bytes(range(256)) * (num_bytes // 256) + bytes(num_bytes % 256)
    with serving(engine, authority.issue()) as server, connected(server, authority.client_only) as store:
        store.set("a", value)
        assert store.get("a") == value


@pytest.mark.sweep(1)
def test_the_largest_value_goes_through_and_one_byte_more_does_not(engine: str, authority: Authority) -> None:
    value = bytes(64 << 20)
    with serving(engine, authority.issue()) as server, connected(server, authority.client_only) as store:
        store.set("a", value)
        assert store.get("a") == value
        with pytest.raises(StoreLimitError, match="DISTTRAIN_STORE_MAX_VALUE_BYTES"):
            store.set("a", value + b"x")
        assert store.num_keys() == 1


def test_many_clients_come_at_once(engine: str, authority: Authority) -> None:
    def work(_number: int) -> int:
        with connected(server, authority.client_only) as store:
            store.barrier("here", 40)
            return store.add("all", 1)

    with serving(engine, authority.issue()) as server, ThreadPoolExecutor(40) as pool:
        assert sorted(pool.map(work, range(40))) == list(range(1, 41))


def test_what_has_no_room_now_goes_before_what_is_sent_next(authority: Authority) -> None:
    near, far = socket.socketpair()
    with near, far, ThreadPoolExecutor(1) as pool:
        for end in (near, far):
            end.settimeout(LONG_S)
        secured = pool.submit(ClientTls(authority.client_only).secure, near, time.monotonic() + LONG_S, "here")
        tunnel = Tunnel(make_context(authority.issue(), is_server=True), is_server=True)
        while not tunnel.is_open:
            tunnel.write_wire(far.recv(1 << 16))
            tunnel.shake_hands()
            far.sendall(tunnel.flush())
        stream, _ = secured.result()
        sent = b""
        near.setblocking(False)
        while True:
            # Until the kernel takes no more of it, and twice after that.
            data = bytes([len(sent) % 251]) * 5000
            assert stream.send(data, socket.MSG_DONTWAIT) == len(data)
            sent += data
            if stream._unsent:
                break
        stream.send(b"still no room", socket.MSG_DONTWAIT)
        near.settimeout(LONG_S)
        last = pool.submit(stream.sendall, b"the end")
        received = b""
        while not received.endswith(b"the end"):
            tunnel.write_wire(far.recv(1 << 16))
            received += tunnel.read_all()
        last.result()
        assert received == sent + b"still no room" + b"the end"


@pytest.mark.parametrize("record", [b"\x14\x03\x03\x00\x01\x01", b"\x16\x03\x03\x00\x01\x02"])
def test_a_handshake_without_an_end_keeps_no_client(authority: Authority, record: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        port = listener.getsockname()[1]
        asked = pool.submit(TCPStore, "127.0.0.1", port, timeout=0.5, certificates=authority.client_only)
        while not asked.done():
            peer, _ = listener.accept() if select.select([listener], [], [], 0.05)[0] else (None, None)
            try:
                while peer is not None:
                    peer.sendall(record)
            except OSError:
                # The client has gone, perhaps to try again.
                assert peer is not None
                peer.close()
        with pytest.raises(StoreConnectionError, match=r"no store within 0.5 s: "):
            asked.result(LONG_S)


def test_a_master_needs_a_certificate(authority: Authority) -> None:
    with pytest.raises(SettingError, match=r"no certificate for its server.*Set DISTTRAIN_STORE_TLS_CERT"):
        TCPStore("127.0.0.1", 0, is_master=True, certificates=authority.client_only)
    bad = authority.issue()._replace(key_file="/nowhere/key")
    with pytest.raises(SettingError, match=r"the files for TLS cannot be used: No such file"):
        TCPStore("127.0.0.1", 0, is_master=True, certificates=bad)


def test_openssl_is_loaded_only_for_certificates(authority: Authority, tmp_path: Path) -> None:
    code = f"""
import sys
from disttrain.store import Certificates, TCPStore
TCPStore("127.0.0.1", 0, is_master=True).close()
print("ssl" in sys.modules)
TCPStore("127.0.0.1", 0, is_master=True, certificates={authority.issue()!r}).close()
print("ssl" in sys.modules)
"""
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert answer.stdout.split() == ["False", "True"]
