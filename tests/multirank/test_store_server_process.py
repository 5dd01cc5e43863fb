"""The life of a server process: who starts it, who ends it, who gets in, and what strangers can do to it."""

from __future__ import annotations

import importlib.util
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from disttrain.errors import SettingError, StoreAddressError, StoreAuthError, StoreConnectionError, StoreTimeoutError
from disttrain.store import Limits, ServerProcess, TCPStore, new_token, spawn_server, write_token
from disttrain.store.protocol.wire import Decoder, Op, encode

ENGINES = [engine for engine in ("pyuv", "uvloop") if importlib.util.find_spec(engine)]
GONE_S = 60.0
TOKEN = new_token()

OWNER = """
import sys
from disttrain.store import spawn_server
server = spawn_server("127.0.0.1", 0, linger_s=float(sys.argv[1]), engine=sys.argv[2])
print(server.port, server.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(engine: str) -> Iterator[ServerProcess]:
    running = spawn_server("127.0.0.1", 0, TOKEN, engine=engine)
    yield running
    running.close()


def connect(server: ServerProcess, token: str | None = TOKEN, timeout_s: float = 120.0) -> TCPStore:
    return TCPStore(server.host, server.port, timeout=timeout_s, token=token)


def gone_within(pid: int, timeout_s: float) -> bool:
    """True once the process has ended, whether or not its parent has collected it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


class Owner:
    """A process that owns a server, to be killed."""

    def __init__(self, linger_s: float, engine: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(linger_s), engine], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.port, self.server_pid = map(int, self.process.stdout.readline().split())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_the_server_ends_at_once_when_its_owner_is_killed(engine: str) -> None:
    owner = Owner(60.0, engine)
    assert psutil.pid_exists(owner.server_pid)
    owner.kill()
    assert gone_within(owner.server_pid, GONE_S)


def test_the_server_serves_its_clients_on_for_a_while(engine: str) -> None:
    owner = Owner(60.0, engine)
    client = TCPStore("127.0.0.1", owner.port, timeout=120.0)
    client.set("a", "1")
    owner.kill()
    assert client.get("a") == b"1"
    client.close()
    assert gone_within(owner.server_pid, GONE_S)


def test_the_server_lingers_no_longer_than_it_was_told(engine: str) -> None:
    owner = Owner(0.3, engine)
    client = TCPStore("127.0.0.1", owner.port, timeout=120.0)
    owner.kill()
    started_s = time.monotonic()
    with pytest.raises(StoreConnectionError, match="get: the connection to the store is gone"):
        client.get("never")
    assert time.monotonic() - started_s < GONE_S
    assert gone_within(owner.server_pid, GONE_S)
    client.close()


def test_close_ends_and_reaps_the_server(engine: str) -> None:
    server = spawn_server("127.0.0.1", 0, engine=engine)
    server.close()
    server.close()
    assert gone_within(server.pid, GONE_S)
    for thread in threading.enumerate():
        # On a busy machine the end may take longer than `close` waits; then a thread collects the process.
        if thread.name == "disttrain-store-reaper":
            thread.join(GONE_S)
    assert not psutil.pid_exists(server.pid)


def test_its_address_is_free_on_close_though_clients_linger(engine: str) -> None:
    first = spawn_server("127.0.0.1", 0, engine=engine)
    client = TCPStore("127.0.0.1", first.port)
    client.set("of", "the first")
    first.close()
    second = spawn_server("127.0.0.1", first.port, engine=engine)
    newcomer = TCPStore("127.0.0.1", first.port)
    assert client.get("of") == b"the first"
    assert not newcomer.check(["of"])
    for one in (client, newcomer, second):
        one.close()


def test_the_server_is_in_a_session_of_its_own_and_ignores_ctrl_c(server: ServerProcess) -> None:
    assert os.getsid(server.pid) == server.pid != os.getsid(0)
    client = connect(server)
    os.kill(server.pid, signal.SIGINT)
    client.set("a", "1")
    assert client.get("a") == b"1"
    client.close()


def test_the_token_is_not_in_arguments_or_environment(server: ServerProcess) -> None:
    for name in ("cmdline", "environ"):
        assert TOKEN.encode() not in Path(f"/proc/{server.pid}/{name}").read_bytes()


def test_the_server_loads_neither_torch_nor_numpy(engine: str) -> None:
    code = f"import sys, disttrain.store.server, disttrain.store.serving.shell_{engine}; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert f"disttrain.store.serving.shell_{engine}" in modules
    assert not {"torch", "numpy", "disttrain.settings", "disttrain.store.tls.records"} & set(modules)


def test_a_port_in_use_is_one_clear_error(engine: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            StoreAddressError, match=rf"Address already in use.*pick another port.*\[127.0.0.1:{port}\]"
        ):
            spawn_server("127.0.0.1", port, engine=engine)


def test_an_address_of_another_machine_is_one_clear_error() -> None:
    with pytest.raises(StoreAddressError, match="does not have this address"):
        spawn_server("192.0.2.1", 0, TOKEN)


def test_an_unknown_engine_is_one_clear_error() -> None:
    with pytest.raises(SettingError, match="no engine 'asyncio'"):
        spawn_server("127.0.0.1", 0, engine="asyncio")


@pytest.mark.parametrize("host", ["", "0.0.0.0", "192.0.2.1"])
def test_no_public_address_without_a_token(host: str) -> None:
    with pytest.raises(StoreAuthError, match=r"loopback only.*Make a token with"):
        spawn_server(host, 0)


def test_a_master_with_a_token_listens_on_every_address() -> None:
    master = TCPStore("0.0.0.0", 0, is_master=True, timeout=120.0, token=TOKEN)
    worker = TCPStore("127.0.0.1", master.port, timeout=120.0, token=TOKEN)
    worker.set("a", "1")
    assert master.get("a") == b"1"
    worker.close()
    master.close()


def test_a_wrong_token_fails_at_once(server: ServerProcess) -> None:
    started_s = time.monotonic()
    with pytest.raises(StoreAuthError, match="token is not the server's"):
        connect(server, new_token(), 60.0)
    with pytest.raises(StoreAuthError, match="asks for the job's token"):
        connect(server, None, 60.0)
    assert time.monotonic() - started_s < 40.0


def test_the_token_file_of_the_environment_is_used(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_token(tmp_path / "token", TOKEN)
    monkeypatch.setenv("DISTTRAIN_TOKEN_FILE", str(tmp_path / "token"))
    client = connect(server, None)
    client.set("a", "1")
    client.close()


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x02\x91\xc0", encode([1, Op.SET, "a", b"b"]), b"\xff" * 4096]
)
def test_strangers_are_hung_up_on_and_hurt_nobody(server: ServerProcess, sent: bytes) -> None:
    client = connect(server)
    with socket.create_connection((server.host, server.port), timeout=GONE_S) as stranger:
        stranger.sendall(sent)
        received = b""
        try:
            while data := stranger.recv(4096):
                received += data
        except ConnectionResetError:
            pass
    assert len(received) < 200
    assert client.num_keys() == 0
    client.close()


def test_a_client_killed_in_mid_frame_leaves_nothing(server: ServerProcess) -> None:
    client = connect(server)
    channel = client._channel
    assert channel is not None
    channel._socket.sendall(encode([7, Op.BARRIER, "go", 2, 60.0]) + b"\0\0\1\0half")
    channel._socket.close()
    other = connect(server)
    with pytest.raises(StoreTimeoutError, match="1 of 2 members"):
        other.barrier("go", 2, 0.1)
    other.close()


def test_a_slow_reader_is_dropped(engine: str) -> None:
    limits = Limits(value_bytes=1 << 20, frame_bytes=2 << 20, unread_bytes=4 << 20)
    server = spawn_server("127.0.0.1", 0, engine=engine, limits=limits)
    client = connect(server, None)
    client.set("a", b"x" * (1 << 20))
    slow = connect(server, None)
    channel = slow._channel
    assert channel is not None

    def ask_and_never_read() -> None:
        for number in range(100_000):
            channel._socket.sendall(encode([number, Op.GET, "a", 10.0]))
            client.num_keys()

    with pytest.raises(ConnectionError):
        ask_and_never_read()
    assert client.num_keys() == 1
    for store in (slow, client):
        store.close()
    server.close()


def test_a_stranger_that_says_nothing_is_hung_up_on(server: ServerProcess) -> None:
    with socket.create_connection((server.host, server.port), timeout=120.0) as stranger:
        started_s = time.monotonic()
        assert Decoder(512).feed(stranger.recv(512))[0][0] == "disttrain store"
        assert stranger.recv(1) == b""
        assert 4.5 < time.monotonic() - started_s < 60.0


@pytest.mark.parametrize("is_read", [True, False])
def test_a_stderr_that_takes_nothing_does_not_hold_the_server(engine: str, is_read: bool) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    while select.select([], [writing], [], 0.0)[1]:
        os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, "0", engine],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=writing,
    )
    os.close(writing)
    if not is_read:
        os.close(reading)
    with owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        port = int(owner.stdout.readline().split()[0])
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port), timeout=GONE_S) as stranger:
                stranger.sendall(b"\xff" * 8)
                while stranger.recv(4096):
                    pass
        client = TCPStore("127.0.0.1", port, timeout=GONE_S)
        assert client.num_keys() == 0
        client.close()
        owner.stdin.close()
    if is_read:
        os.close(reading)


def test_endless_timeouts_stop_no_clock(server: ServerProcess) -> None:
    raw, endless = connect(server), connect(server, timeout_s=math.inf)
    channel = raw._channel
    assert channel is not None
    # Each of them is more milliseconds than libuv can count.
    for request_id, timeout_s in enumerate((1e17, 1e300, 1 << 63)):
        channel._socket.sendall(encode([request_id, Op.GET, "never", timeout_s]))
    with ThreadPoolExecutor(1) as pool:
        value = pool.submit(endless.get, "later")
        other = connect(server)
        with pytest.raises(StoreTimeoutError):
            other.wait(["never"], 0.1)
        other.set("later", b"1")
        assert value.result(GONE_S) == b"1"
    for store in (raw, endless, other):
        store.close()


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_what_cannot_be_a_host_name_is_refused_at_once(host: str) -> None:
    with pytest.raises(SettingError, match=f"connect: '{host}' is not a host name"):
        TCPStore(host, 1)
    with pytest.raises(SettingError, match=f"spawn_server: '{host}' is not a host name"):
        spawn_server(host, 0, TOKEN)


def test_what_listens_there_may_be_no_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        port = listener.getsockname()[1]
        asked = pool.submit(TCPStore, "127.0.0.1", port, timeout=0.5)
        peer, _ = listener.accept()
        peer.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        with pytest.raises(StoreConnectionError, match=rf"no store within 0.5 s: .*\[127.0.0.1:{port}\]"):
            asked.result()
        peer.close()


def test_nobody_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(
        StoreConnectionError, match=r"no store within 0.2 s: nobody listens there \(.*\)\. See whether the server"
    ):
        TCPStore("127.0.0.1", port, timeout=0.2)


def test_a_server_that_comes_later_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(TCPStore, "127.0.0.1", port, timeout=120.0)
        master = TCPStore("127.0.0.1", port, is_master=True, timeout=120.0)
        worker = early.result()
        worker.set("a", "1")
        assert master.get("a") == b"1"
        worker.close()
        master.close()


def test_the_master_waits_for_its_workers(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTTRAIN_STORE_ENGINE", engine)
    with pytest.raises(StoreTimeoutError, match=r"after 0\.3 seconds .* 1/2 clients joined"):
        TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        master = pool.submit(TCPStore, "127.0.0.1", port, 3, is_master=True, timeout=120.0)
        workers = [TCPStore("127.0.0.1", port, 3, timeout=120.0) for _ in range(2)]
        assert master.result().num_keys() == 0
        for store in (*workers, master.result()):
            store.close()


def test_a_multi_tenant_master_joins_the_store_that_is_there() -> None:
    first = TCPStore("127.0.0.1", 0, is_master=True, timeout=120.0)
    with pytest.raises(StoreAddressError):
        TCPStore("127.0.0.1", first.port, is_master=True, timeout=120.0)
    second = TCPStore("127.0.0.1", first.port, is_master=True, timeout=120.0, multi_tenant=True)
    second.set("a", "1")
    assert first.get("a") == b"1"
    second.close()
    first.close()


def test_a_descriptor_that_is_no_socket_is_refused_and_stays_open() -> None:
    reader, writer = os.pipe()
    with pytest.raises(SettingError, match="master_listen_fd"):
        TCPStore("127.0.0.1", 0, is_master=True, master_listen_fd=reader)
    os.close(reader)
    os.close(writer)
    with pytest.raises(SettingError, match=f"descriptor {reader} .* is no socket"):
        TCPStore("127.0.0.1", 0, is_master=True, master_listen_fd=reader)


def test_a_client_needs_a_port() -> None:
    with pytest.raises(SettingError, match="port is 0"):
        TCPStore("127.0.0.1", 0)
