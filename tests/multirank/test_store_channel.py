"""One connection, many threads: nobody gets another's answer, nobody is forgotten, whoever leads or gives up."""

from __future__ import annotations

import ctypes
import importlib.util
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from disttrain.errors import StoreConnectionError, StoreTimeoutError
from disttrain.store import PrefixStore, TCPStore
from disttrain.store.responder import Responder

ENGINES = [engine for engine in ("pyuv", "uvloop") if importlib.util.find_spec(engine)]
EVERY_SERVER = pytest.mark.parametrize("store", [*ENGINES, f"{ENGINES[0]}-tls"], indirect=True)
"""For much at once. Who leads and who gives up is the client's own affair, whatever the server runs on."""

NUM_THREADS = 12
NUM_ROUNDS = 150


class Interruption(BaseException):
    """Thrown into a thread that waits, as a signal handler would."""


@pytest.fixture(params=[ENGINES[0], f"{ENGINES[0]}-tls"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[TCPStore]:
    engine, _, is_tls = request.param.partition("-")
    monkeypatch.setenv("DISTTRAIN_STORE_ENGINE", engine)
    if is_tls:
        request.getfixturevalue("tls_settings")
    running = TCPStore("127.0.0.1", 0, is_master=True, timeout=60.0)
    yield running
    running.close()


@EVERY_SERVER
def test_thousands_of_operations_beside_long_waits(store: TCPStore) -> None:
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        waiting = [pool.submit(store.get, f"end{number}") for number in range(4)]

        def work(worker: int) -> int:
            for number in range(NUM_ROUNDS):
                store.set(f"own{worker}", f"{worker}-{number}")
                assert store.get(f"own{worker}") == f"{worker}-{number}".encode()
                store.add("all", 1)
            return worker

        workers = NUM_THREADS - len(waiting)
        assert list(pool.map(work, range(workers))) == list(range(workers))
        assert store.get("all") == str(workers * NUM_ROUNDS).encode()
        assert not any(future.done() for future in waiting)
        store.multi_set([f"end{number}" for number in range(4)], ["0", "1", "2", "3"])
        assert [future.result() for future in waiting] == [b"0", b"1", b"2", b"3"]


def test_timeouts_race_with_answers_and_leadership(store: TCPStore) -> None:
    def work(worker: int) -> int:
        chance = random.Random(worker)
        num_timeouts = 0
        for number in range(40):
            key = f"{worker}-{number}"
            later = threading.Timer(chance.uniform(0.0, 0.004), store.set, (key, key))
            later.start()
            try:
                store.wait([key], chance.uniform(0.0005, 0.004))
            except StoreTimeoutError:
                num_timeouts += 1
            assert store.get(key) == key.encode()
            later.join()
        return num_timeouts

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        num_timeouts = list(pool.map(work, range(NUM_THREADS)))
    assert sum(num_timeouts) > 0
    assert store.num_keys() == NUM_THREADS * 40


def test_members_of_a_barrier_may_share_a_connection(store: TCPStore) -> None:
    def work(worker: int) -> list[int]:
        seen = []
        for number in range(30):
            store.add(f"round{number}", 1)
            store.barrier("round", NUM_THREADS)
            seen.append(store.add(f"round{number}", 0))
        return seen

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for seen in pool.map(work, range(NUM_THREADS)):
            assert seen == [NUM_THREADS] * 30


def test_a_leader_that_is_interrupted_passes_the_lead_on(store: TCPStore) -> None:
    channel = store._channel
    assert channel is not None
    interrupted = []

    def wait_to_be_interrupted() -> None:
        try:
            store.get("never")
        except Interruption as interruption:
            interrupted.append(interruption)

    with ThreadPoolExecutor(4) as pool:
        for number in range(20):
            leader = threading.Thread(target=wait_to_be_interrupted)
            leader.start()
            while channel._leader is None:
                time.sleep(0.0005)
            followers = [pool.submit(store.get, f"k{number}") for _ in range(4)]
            # It is raised once the leader runs again, that is, when it has read somebody's answer.
            assert leader.ident is not None
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(leader.ident), ctypes.py_object(Interruption))
            store.set(f"k{number}", "1")
            assert [future.result(60.0) for future in followers] == [b"1"] * 4
            leader.join()
    assert len(interrupted) == 20
    assert not channel._calls
    assert not channel._parked
    assert channel._leader is None


@EVERY_SERVER
def test_large_and_small_requests_share_a_connection(store: TCPStore) -> None:
    large = bytes(range(256)) * (1 << 15)

    def work(worker: int) -> None:
        for number in range(4):
            store.set(f"large{worker}", large)
            assert store.get(f"large{worker}") == large
            assert store.add(f"small{worker}", 1) == number + 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_listeners_share_a_connection_and_are_closed_each_on_its_own(store: TCPStore) -> None:
    counted = store.clone()
    before = num_connections(store)
    listeners = [PrefixStore("heard", store).listener() for _ in range(5)]
    assert num_connections(store) == before + 1
    with ThreadPoolExecutor(5) as pool:
        # Each waits; the first of them leads, and is the first to be closed.
        waiting = []
        for number, listener in enumerate(listeners):
            waiting.append(pool.submit(listener.queue_pop, f"q{number}", True, 50.0))
            time.sleep(0.02)
        for number in (0, 3):
            listeners[number].close()
            with pytest.raises(StoreConnectionError, match="it was closed"):
                waiting[number].result(60.0)
            with pytest.raises(StoreConnectionError, match="it was closed"):
                listeners[number].get("anything")
        for number in (1, 2, 4):
            counted.queue_push(f"heard/q{number}", str(number))
            assert waiting[number].result(60.0) == str(number).encode()
        # What a closed one waited for takes nothing.
        counted.queue_push("heard/q0", "kept")
        assert counted.queue_len("heard/q0") == 1
    for listener in listeners:
        listener.close()
        listener.close()
    assert num_connections(store) == before
    again = store.listener()
    assert again.queue_pop("heard/q0") == b"kept"
    again.close()
    counted.close()


@pytest.mark.parametrize("num_members", [2, 8])
def test_all_that_waits_idly_has_one_connection(store: TCPStore, num_members: int) -> None:
    before = num_connections(store)
    members = [Responder(store, f"part {number}", 0, str.encode) for number in range(num_members)]
    assert num_connections(store) == before + 1
    assert members[0].ask([0], 10.0, "well") == {0: b"well"}
    for member in members:
        member.close()
    assert num_connections(store) == before


def num_connections(store: TCPStore) -> int:
    """Of this process, to the store's server."""
    ends = psutil.Process().net_connections("tcp")
    return sum(bool(end.raddr) and end.raddr.port == store.port and end.status == "ESTABLISHED" for end in ends)
