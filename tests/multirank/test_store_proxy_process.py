"""Proxies in processes of their own: connections at the server, who gets in, and what becomes of a server's end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from disttrain.errors import SettingError, StoreAuthError, StoreConnectionError, StoreError, StoreTimeoutError
from disttrain.store import Certificates, Following, ServerProcess, TCPStore, new_token, spawn_server
from disttrain.store.proxy.address import UpstreamAddress
from disttrain.store.standby.elector import Elector
from tests.surroundings.authority import Authority

HOST = "127.0.0.1"
TOKEN = new_token()
SOON_S = 80.0


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with contextlib.closing(spawn_server(HOST, 0, TOKEN)) as server:
        yield server


@pytest.fixture(params=["tcp", "unix"])
def proxy(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[ServerProcess]:
    host = HOST if request.param == "tcp" else a_name()
    with contextlib.closing(spawn_server(host, 0, TOKEN, upstream=UpstreamAddress(HOST, server.port))) as proxy:
        yield proxy


def a_name() -> str:
    return f"@disttrain-{uuid4().hex}"


def connect(server: ServerProcess, token: str | None = TOKEN) -> TCPStore:
    return TCPStore(server.host, server.port, timeout=SOON_S, token=token)


def num_connections(server: ServerProcess) -> int:
    ends = psutil.Process(server.pid).net_connections("tcp")
    return sum(end.status == "ESTABLISHED" and end.laddr.port == server.port for end in ends)


@pytest.mark.parametrize("num_clients", [4, 32])
def test_the_server_has_one_connection_of_a_node(server: ServerProcess, proxy: ServerProcess, num_clients: int) -> None:
    clients = [connect(proxy) for _ in range(num_clients)]
    with ThreadPoolExecutor(num_clients) as pool:
        sums = list(pool.map(lambda client: client.add("came", 1), clients))
        assert sorted(sums) == list(range(1, num_clients + 1))
        list(pool.map(lambda client: client.barrier("all", num_clients), clients))
    assert num_connections(server) == 1
    for client in clients:
        client.close()


def test_it_asks_for_the_token_too(proxy: ServerProcess) -> None:
    with pytest.raises(StoreAuthError, match="token is not the server's"):
        connect(proxy, new_token())
    with pytest.raises(StoreAuthError, match="asks for the job's token and we have none"):
        connect(proxy, None)


def test_a_proxy_needs_the_token_itself(server: ServerProcess) -> None:
    with pytest.raises(StoreAuthError, match="token is not the server's"):
        spawn_server(HOST, 0, new_token(), upstream=UpstreamAddress(HOST, server.port))


def test_large_values_and_a_slow_server(server: ServerProcess, proxy: ServerProcess) -> None:
    value = os.urandom(16 << 20)
    clients = [connect(proxy) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        os.kill(server.pid, signal.SIGSTOP)
        setting = [pool.submit(client.set, f"large {number}", value) for number, client in enumerate(clients)]
        time.sleep(0.3)
        os.kill(server.pid, signal.SIGCONT)
        for future in setting:
            future.result(SOON_S)
        for got in pool.map(lambda number: clients[number].get(f"large {3 - number}"), range(4)):
            assert got == value
    for client in clients:
        client.close()


def test_clients_hear_that_the_server_is_gone(server: ServerProcess, proxy: ServerProcess) -> None:
    client = connect(proxy)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait, ["never"])
        time.sleep(0.1)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(StoreConnectionError):
            waiting.result(SOON_S)
    with pytest.raises(StoreConnectionError):
        client.set("a", "b")
    until_s = time.monotonic() + SOON_S
    while proxy.is_running:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_client_that_dies_gives_its_place_up(server: ServerProcess, proxy: ServerProcess) -> None:
    direct, dying, staying = connect(server), connect(proxy), connect(proxy)
    with ThreadPoolExecutor(2) as pool:
        lost = pool.submit(dying.queue_pop, "q")
        time.sleep(0.1)
        waiting = pool.submit(staying.queue_pop, "q")
        time.sleep(0.1)
        dying.close()
        with pytest.raises(StoreError):
            lost.result(SOON_S)
        time.sleep(0.1)
        direct.queue_push("q", "for who is there")
        assert waiting.result(SOON_S) == b"for who is there"
        with pytest.raises(StoreTimeoutError, match="1 of 3 members came"):
            staying.barrier("three", 3, timeout=0.2)
    direct.close()
    staying.close()


def test_its_session_ends_with_it(server: ServerProcess) -> None:
    proxy = spawn_server(HOST, 0, TOKEN, upstream=UpstreamAddress(HOST, server.port), linger_s=0.1)
    client, direct = connect(proxy), connect(server)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.queue_pop, "q")
        time.sleep(0.1)
        proxy.close()
        with pytest.raises(StoreConnectionError):
            waiting.result(SOON_S)
    direct.queue_push("q", "kept")
    assert direct.queue_pop("q") == b"kept"
    direct.close()


def test_a_link_that_breaks_is_made_anew_and_nothing_is_done_twice(server: ServerProcess) -> None:
    with contextlib.closing(Relay(server.port)) as relay:
        proxy = spawn_server(HOST, 0, TOKEN, upstream=UpstreamAddress(HOST, relay.port))
        clients = [connect(proxy) for _ in range(4)]

        def add(client: TCPStore) -> None:
            for _ in range(300):
                client.add("sum", 1)

        with ThreadPoolExecutor(4) as pool:
            adding = [pool.submit(add, client) for client in clients]
            for _ in range(5):
                time.sleep(0.1)
                relay.cut()
            for future in adding:
                future.result(2 * SOON_S)
        assert clients[0].get("sum") == b"1200"
        for client in clients:
            client.close()
        proxy.close()


def test_over_tls_what_it_says_is_secret_and_the_server_one_of_the_jobs(
    server: ServerProcess, authority: Authority, tmp_path: Path
) -> None:
    secured = spawn_server(HOST, 0, TOKEN, certificates=authority.issue(asks_clients=True))
    passed: list[bytes] = []
    with contextlib.closing(Relay(secured.port, passed)) as relay:
        upstream = UpstreamAddress(HOST, relay.port, timeout_s=SOON_S)
        shown, own = authority.issue(), Certificates(str(authority.file))
        proxy = spawn_server(a_name(), 0, TOKEN, upstream=upstream, certificates=shown)
        # Workers have the files too, and need none.
        clients = [
            TCPStore(proxy.host, proxy.port, timeout=SOON_S, token=TOKEN, certificates=certificates)
            for certificates in (None, shown, own)
        ]
        large = b"a secret" * (1 << 18)
        clients[0].set("large", large)
        assert clients[1].get("large") == large
        relay.cut()
        with ThreadPoolExecutor(3) as pool:
            assert sorted(pool.map(lambda client: client.add("came", 1), clients)) == [1, 2, 3]
            list(pool.map(lambda client: client.barrier("all", 3), clients))
        assert sum(map(len, passed)) > 2 * len(large)
        assert not any(b"a secret" in data or b"large" in data for data in passed)
        for client in clients:
            client.close()
        proxy.close()
        with pytest.raises(StoreAuthError, match="does not take us over TLS"):
            spawn_server(a_name(), 0, TOKEN, upstream=upstream, certificates=own)
        with pytest.raises(StoreAuthError, match="not one of the job's"):
            spawn_server(a_name(), 0, TOKEN, upstream=upstream, certificates=Authority(tmp_path).issue())
    with pytest.raises(StoreAuthError, match="does not speak TLS"):
        spawn_server(a_name(), 0, TOKEN, upstream=UpstreamAddress(HOST, server.port), certificates=shown)
    with pytest.raises(SettingError, match=r"'127\.0\.0\.1' is an address of a network"):
        spawn_server(HOST, 0, TOKEN, upstream=upstream, certificates=shown)
    secured.close()


@pytest.mark.parametrize("is_secured", [False, True], ids=["plain", "tls"])
def test_a_standby_takes_over_behind_it(authority: Authority, is_secured: bool) -> None:
    certificates = authority.issue() if is_secured else None
    leader = spawn_server(HOST, 0, TOKEN, certificates=certificates)
    agent = TCPStore(HOST, leader.port, timeout=SOON_S, token=TOKEN, certificates=certificates)
    elector = Elector(agent)
    elector.start()
    following = Following(HOST, leader.port, HOST, 3.0)
    standby = spawn_server(HOST, 0, TOKEN, following=following, certificates=certificates)
    until_s = time.monotonic() + SOON_S
    while agent.addresses[1] != (HOST, standby.port):
        assert time.monotonic() < until_s
        agent.add("asked", 1)
        time.sleep(0.01)
    proxy = spawn_server(a_name(), 0, TOKEN, upstream=UpstreamAddress(HOST, leader.port), certificates=certificates)
    clients = [connect(proxy) for _ in range(5)]
    clients[0].set("before", "1")
    with ThreadPoolExecutor(3) as pool:
        waiting = pool.submit(clients[1].get, "after")
        meeting = [pool.submit(client.barrier, "three", 3) for client in clients[3:]]
        time.sleep(0.1)
        os.kill(leader.pid, signal.SIGKILL)
        assert clients[0].get("before") == b"1"
        clients[2].set("after", "2")
        assert waiting.result(SOON_S) == b"2"
        clients[0].barrier("three", 3)
        for future in meeting:
            future.result(SOON_S)
    for client in clients:
        client.close()
    elector.close()
    for each in (agent, proxy, standby, leader):
        each.close()


class Relay:
    """Passes bytes on to the server, until the connections are cut; `passed` gets them all."""

    def __init__(self, port: int, passed: list[bytes] | None = None) -> None:
        self._to = port
        self._passed = passed
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        ends, self._open = self._open, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((HOST, self._to))
                self._open += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError), one:
            while data := one.recv(1 << 16):
                other.sendall(data)
                if self._passed is not None:
                    self._passed.append(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)
