"""Links that break: the client makes another one, repeats what has no answer, and the server applies it once."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

from disttrain.errors import StoreConnectionError, StoreLimitError, StoreTimeoutError
from disttrain.store import Limits, ServerProcess, TCPStore, spawn_server
from disttrain.store.connection.channel import Channel
from disttrain.store.protocol.wire import Op

ENGINES = [engine for engine in ("pyuv", "uvloop") if importlib.util.find_spec(engine)]
SOON_S = 0.05


class Relay:
    """Stands between clients and a server, and can cut their connections or swallow what the server says."""

    def __init__(self, port: int) -> None:
        self._server = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.swallows = threading.Event()
        self.num_accepted = 0
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def cut(self) -> None:
        # A client is back before the last of these is shut; its new connection is not one of those to cut.
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                _shut(end)

    def close(self) -> None:
        _shut(self._listener)
        self._threads[0].join()
        self.cut()
        for thread in self._threads[1:]:
            thread.join()
        self._listener.close()

    def _run(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._server)
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs.append((near, far))
            self.num_accepted += 1
            self._run(self._carry_both, far, near)

    def _carry_both(self, far: socket.socket, near: socket.socket) -> None:
        there = threading.Thread(target=self._carry, args=(near, far), daemon=True)
        there.start()
        self._carry(far, near)
        there.join()
        far.close()
        near.close()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                if source.getpeername() != self._server or not self.swallows.is_set():
                    target.sendall(data)
        except OSError:
            pass
        _shut(source)
        _shut(target)


def _shut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


@pytest.fixture(params=[*ENGINES, f"{ENGINES[0]}-tls"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    engine, _, is_tls = request.param.partition("-")
    if is_tls:
        request.getfixturevalue("tls_settings")
    running = spawn_server("127.0.0.1", 0, engine=engine)
    yield running
    running.close()


@pytest.fixture
def relay(server: ServerProcess) -> Iterator[Relay]:
    between = Relay(server.port)
    yield between
    between.close()


@pytest.fixture
def store(relay: Relay) -> Iterator[TCPStore]:
    client = TCPStore("127.0.0.1", relay.port, timeout=120.0)
    yield client
    client.close()


def test_a_lost_answer_is_asked_for_again_and_the_request_applied_once(store: TCPStore, relay: Relay) -> None:
    for number in range(1, 6):
        relay.swallows.set()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(store.add, "counter", 1)
            assert not wait([asked], timeout=SOON_S).done
            relay.swallows.clear()
            relay.cut()
            assert asked.result() == number
    assert relay.num_accepted == 6


def test_a_popped_value_whose_answer_was_lost_is_not_lost(store: TCPStore, relay: Relay) -> None:
    store.queue_push("jobs", "1")
    store.queue_push("jobs", "2")
    relay.swallows.set()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(store.queue_pop, "jobs")
        assert not wait([asked], timeout=SOON_S).done
        relay.swallows.clear()
        relay.cut()
        assert asked.result() == b"1"
    assert store.queue_pop("jobs") == b"2"


def test_waits_and_barriers_survive_a_broken_link(store: TCPStore, relay: Relay, server: ServerProcess) -> None:
    direct = TCPStore("127.0.0.1", server.port, timeout=120.0)
    with ThreadPoolExecutor(4) as pool:
        waiting = [
            pool.submit(store.get, "a"),
            pool.submit(store.barrier, "go", 2),
            pool.submit(store.queue_pop, "jobs"),
            pool.submit(store.watch, "a", None),
        ]
        assert not wait(waiting, timeout=SOON_S).done
        relay.cut()
        assert not wait(waiting, timeout=SOON_S).done
        direct.set("a", "1")
        direct.barrier("go", 2)
        direct.queue_push("jobs", "2")
        assert [future.result() for future in waiting] == [b"1", None, b"2", b"1"]
    direct.close()


def test_a_client_that_is_idle_when_the_link_breaks_does_not_notice(store: TCPStore, relay: Relay) -> None:
    store.set("a", "1")
    relay.cut()
    assert store.get("a") == b"1"


def test_counting_through_a_link_that_keeps_breaking_loses_and_doubles_nothing(store: TCPStore, relay: Relay) -> None:
    num_threads, num_cuts = 4, 10
    is_over = threading.Event()

    def break_it() -> None:
        chance = random.Random(1)
        for _ in range(num_cuts):
            time.sleep(chance.uniform(0.01, 0.05))
            relay.cut()
        is_over.set()

    def count(_: int) -> list[int]:
        totals = []
        while not is_over.is_set():
            totals.append(store.add("counter", 1))
        return totals

    with ThreadPoolExecutor(num_threads + 1) as pool:
        breaking = pool.submit(break_it)
        totals = [total for each in pool.map(count, range(num_threads)) for total in each]
        breaking.result()
    assert sorted(totals) == list(range(1, len(totals) + 1))
    assert relay.num_accepted > 1


def test_what_was_sent_and_answered_before_its_thread_came_to_send_it_is_not_sent_again(
    store: TCPStore, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever makes a new link sends all that has no answer yet, of slow threads too."""
    really_send, really_hand_out, first, answered = (
        Channel._send,
        Channel._hand_out,
        threading.Lock(),
        threading.Event(),
    )
    late: list[object] = []

    def hand_out(self: Channel, request_id: object, call: Any, answer: Any) -> None:
        really_hand_out(self, request_id, call, answer)
        if call in late:
            answered.set()

    with ThreadPoolExecutor(2) as pool:

        def send_late(self: Channel, op: Op, call: Any, frame: bytes, timeout_s: float) -> None:
            if op is Op.ADD and first.acquire(blocking=False):
                late.append(call)
                relay.cut()
                assert answered.wait(60.0)
                relay.cut()
                pool.submit(store.num_keys).result()  # on a third link
            really_send(self, op, call, frame, timeout_s)

        reading = pool.submit(store.get, "the end")
        assert not wait([reading], timeout=SOON_S).done
        monkeypatch.setattr(Channel, "_send", send_late)
        monkeypatch.setattr(Channel, "_hand_out", hand_out)
        assert [store.add("counter", 1) for _ in range(3)] == [1, 2, 3]
        store.set("the end", "")
        reading.result()
    assert relay.num_accepted == 3


def test_nothing_hangs_while_there_is_no_link(store: TCPStore, relay: Relay, server: ServerProcess) -> None:
    store.set_timeout(0.3)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        relay.cut()
        started_s = time.monotonic()
        with pytest.raises((StoreConnectionError, StoreTimeoutError)):
            store.get("a")
        assert time.monotonic() - started_s < 60.0
    finally:
        os.kill(server.pid, signal.SIGCONT)
    store.set_timeout(30.0)
    store.set("a", "1")
    assert store.get("a") == b"1"


def test_another_server_at_the_address_is_not_taken_for_the_first() -> None:
    first = spawn_server("127.0.0.1", 0)
    relay = Relay(first.port)
    store = TCPStore("127.0.0.1", relay.port, timeout=120.0)
    store.set("a", "1")
    second = spawn_server("127.0.0.1", 0)
    relay._server = ("127.0.0.1", second.port)
    relay.cut()
    with pytest.raises(StoreConnectionError, match="is gone: the server knows no such client"):
        store.get("a")
    for each in (store, relay, first, second):
        each.close()


def test_an_interrupted_member_leaves_its_barrier(server: ServerProcess) -> None:
    store = TCPStore("127.0.0.1", server.port, timeout=120.0)

    class Interruption(Exception):
        pass

    def interrupt(_signal: int, _frame: object) -> None:
        raise Interruption

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interruption):
            store.barrier("go", 2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(StoreTimeoutError, match="1 of 2 members"):
        store.barrier("go", 2, SOON_S)
    store.close()


def test_limits_in_all_are_named_and_the_connection_lives_on() -> None:
    server = spawn_server("127.0.0.1", 0, limits=Limits(num_keys=3, num_clients=1, total_bytes=100))
    store = TCPStore("127.0.0.1", server.port, timeout=120.0)
    store.multi_set(["a", "b"], ["", ""])
    store.queue_push("jobs", "")
    with pytest.raises(StoreLimitError, match=r"has 4 keys; the limit is 3 \(DISTTRAIN_STORE_MAX_KEYS\)"):
        store.set("c", "")
    with pytest.raises(StoreLimitError, match=r"has 102 bytes; the limit is 100 \(DISTTRAIN_STORE_MAX_TOTAL_BYTES\)"):
        store.set("a", "x" * 100)
    with pytest.raises(StoreLimitError, match=r"connect: .* 2 clients; the limit is 1 \(DISTTRAIN_STORE_MAX_CLIENTS"):
        TCPStore("127.0.0.1", server.port, timeout=120.0)
    assert store.queue_pop("jobs") == b""
    store.set("c", "x" * 90)
    assert store.list_keys() == ["a", "b", "c"]
    store.close()
    server.close()


def test_both_ends_ask_the_kernel_to_watch_the_link() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=120.0)
    channel = store._channel
    assert channel is not None
    options = (socket.TCP_KEEPIDLE, socket.TCP_USER_TIMEOUT, socket.TCP_NODELAY)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        from disttrain.store.connection.keepalive import set_options  # next to its use

        set_options(listener)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            values = [accepted.getsockopt(socket.IPPROTO_TCP, option) for option in options]
    assert isinstance(channel._socket, socket.socket)
    assert values == [channel._socket.getsockopt(socket.IPPROTO_TCP, option) for option in options]
    assert values == [15, 30_000, 1]
    store.close()


def test_a_session_is_over_when_its_client_says_so(server: ServerProcess, relay: Relay) -> None:
    store = TCPStore("127.0.0.1", relay.port, timeout=120.0)
    channel = store._channel
    assert channel is not None
    assert channel.request(Op.LEAVE, (), 30.0) == (0, None)
    relay.cut()
    with pytest.raises(StoreConnectionError, match="knows no such client"):
        store.get("a")
    store.close()
