"""A server that freezes or dies, forked clients, and very many connections."""

from __future__ import annotations

import importlib.util
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from disttrain.errors import StoreConnectionError, StoreError, StoreTimeoutError
from disttrain.store import Limits, ServerProcess, TCPStore, new_token, spawn_server
from disttrain.store.connection.dial import Dialer, Link
from disttrain.store.protocol.wire import Op, encode
from tests.surroundings.authority import Authority

ENGINES = [engine for engine in ("pyuv", "uvloop") if importlib.util.find_spec(engine)]
GONE_S = 60.0
TOKEN = new_token()


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(engine: str) -> Iterator[ServerProcess]:
    running = spawn_server("127.0.0.1", 0, TOKEN, engine=engine)
    yield running
    running.close()


def connect(server: ServerProcess, timeout_s: float = 120.0) -> TCPStore:
    return TCPStore(server.host, server.port, timeout=timeout_s, token=TOKEN)


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


def test_a_frozen_server_hangs_nobody(server: ServerProcess) -> None:
    client = connect(server)
    client.set_timeout(0.2)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        with pytest.raises(StoreTimeoutError, match="has not answered"):
            client.get("a")
        with ThreadPoolExecutor(4) as pool:
            for asked in [pool.submit(client.set, "a", "1") for _ in range(4)]:
                with pytest.raises(StoreTimeoutError, match="has not answered"):
                    asked.result()
        assert time.monotonic() - started_s < 60.0
    finally:
        os.kill(server.pid, signal.SIGCONT)
    client.set_timeout(20.0)
    assert client.get("a") == b"1"
    client.close()


def test_a_killed_server_is_noticed_at_once(server: ServerProcess) -> None:
    client = connect(server)
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(client.get, f"k{number}") for number in range(4)]
        os.kill(server.pid, signal.SIGKILL)
        for future in waiting:
            with pytest.raises(StoreConnectionError, match="is gone"):
                future.result(GONE_S)
    with pytest.raises(StoreConnectionError, match="See whether its server is alive"):
        client.set("a", "1")
    client.close()


def test_a_forked_child_may_not_use_the_parents_connection(server: ServerProcess) -> None:
    client = connect(server)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            client.get("a")
        except StoreConnectionError as error:
            os.write(write_end, str(error).encode())
        client.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert b"forked from. Make a new TCPStore in the child" in os.read(read_end, 4096)
    client.set("a", "1")
    assert client.get("a") == b"1"
    client.close()
    os.close(read_end)
    os.close(write_end)


def test_a_forked_child_does_not_keep_the_server_alive(engine: str) -> None:
    server = spawn_server("127.0.0.1", 0, engine=engine)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    server.close()
    assert gone_within(server.pid, GONE_S)
    os.close(write_end)
    os.close(read_end)
    os.waitpid(child, 0)


def test_five_hundred_connections_meet_at_a_barrier(server: ServerProcess) -> None:
    clients = [connect(server, timeout_s=60.0) for _ in range(500)]
    with ThreadPoolExecutor(500) as pool:
        list(pool.map(lambda client: client.barrier("go", 500), clients))
    assert clients[0].add("a", 1) == 1
    assert clients[499].add("a", 1) == 2
    for client in clients:
        client.close()


@pytest.mark.sweep(0)
def test_ten_thousand_connections() -> None:
    num_clients = min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 500)
    server = spawn_server("127.0.0.1", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    links: list[Link] = []
    try:
        # Links without the client around them: each thread of a job has one, but not all in one process.
        links.extend(Dialer(server.host, server.port, None).dial(60.0) for _ in range(num_clients))
        for number, link in enumerate(links[1:]):
            link.socket.sendall(encode([number, Op.BARRIER, "go", num_clients, 60.0]))
        links[0].socket.sendall(encode([0, Op.BARRIER, "go", num_clients, 60.0]))
        assert all(link.socket.recv(100) for link in links)
    finally:
        for link in links:
            link.socket.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        server.close()


@pytest.mark.parametrize("is_tls", [False, True])
def test_silent_strangers_keep_nobody_out(engine: str, authority: Authority, is_tls: bool) -> None:
    certificates = authority.issue() if is_tls else None
    limits = Limits(num_unproved=20)
    server = spawn_server("127.0.0.1", 0, TOKEN, engine=engine, limits=limits, certificates=certificates)
    strangers: list[socket.socket] = []
    is_over = threading.Event()

    def come() -> None:
        while not is_over.is_set() and len(strangers) < 3000:
            strangers.append(socket.create_connection((server.host, server.port), timeout=GONE_S))
            if len(strangers) > 100:
                strangers[-100].close()

    with ThreadPoolExecutor(2) as pool:
        coming = [pool.submit(come) for _ in range(2)]
        for number in range(5):
            store = TCPStore(server.host, server.port, timeout=60.0, token=TOKEN, certificates=certificates)
            assert store.add("came", 1) == number + 1
            store.close()
        num_descriptors = psutil.Process(server.pid).num_fds()
        is_over.set()
        for one in coming:
            one.result()
    assert num_descriptors < 100
    for stranger in strangers:
        stranger.close()
    server.close()


def test_a_server_that_dies_at_its_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "true")
    for _ in range(20):  # before its configuration is written, or after
        with pytest.raises(StoreError, match="the server ended before it listened"):
            spawn_server("127.0.0.1", 0)
