"""A store whose server is killed: its standby takes over, and nothing that anybody was told is lost or done twice."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from disttrain.errors import StoreConnectionError, StoreTimeoutError
from disttrain.store import Certificates, Following, ServerProcess, TCPStore, new_token, spawn_server
from disttrain.store.protocol.limits import Limits
from disttrain.store.standby.elector import BEAT_S, Elector
from tests.surroundings.authority import Authority

ENGINES = [engine for engine in ("pyuv", "uvloop") if importlib.util.find_spec(engine)]
HOST = "127.0.0.1"
TOKEN = new_token()
PATIENCE_S = 3.0
SOON_S = 80.0


class Pair:
    """A leader and its standby."""

    def __init__(
        self,
        engine: str,
        certificates: Certificates | None = None,
        patience_s: float = PATIENCE_S,
        limits: Limits | None = None,
    ) -> None:
        self._certificates = certificates
        self.leader = spawn_server(HOST, 0, TOKEN, engine=engine, certificates=certificates, limits=limits)
        self.store = self.connect()
        self.standby = self.add_standby(engine, patience_s)

    def add_standby(self, engine: str, patience_s: float = PATIENCE_S) -> ServerProcess:
        following = Following(HOST, self.leader.port, HOST, patience_s)
        return spawn_server(HOST, 0, TOKEN, engine=engine, certificates=self._certificates, following=following)

    def connect(self) -> TCPStore:
        return TCPStore(HOST, self.leader.port, timeout=SOON_S, token=TOKEN, certificates=self._certificates)

    def wait_until_ready(self, standby: ServerProcess | None = None, *, store: TCPStore | None = None) -> None:
        """Until clients, of which `store` or the pair's own asks all the time, are told of the standby."""
        asking = store or self.store
        until_s = time.monotonic() + SOON_S
        while asking.addresses[1] != (HOST, (standby or self.standby).port):
            assert time.monotonic() < until_s, asking.addresses
            asking.add("asked", 1)
            time.sleep(0.01)

    def kill(self) -> None:
        os.kill(self.leader.pid, signal.SIGKILL)

    def close(self) -> None:
        self.store.close()
        self.leader.close()
        self.standby.close()


@pytest.fixture(params=ENGINES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with contextlib.closing(Pair(request.param)) as pair:
        yield pair


@pytest.fixture
def one_pair() -> Iterator[Pair]:
    with contextlib.closing(Pair(ENGINES[0])) as pair:
        yield pair


def hammer(pair: Pair, num_clients: int, is_over: threading.Event) -> tuple[list[int], list[bytes], list[bytes]]:
    """Many clients at once, until `is_over`; the sums they were told, what they have pushed, and what they popped."""

    def add() -> list[int]:
        with contextlib.closing(pair.connect()) as store:
            sums = []
            while not is_over.is_set():
                sums.append(store.add("sum", 1))
            return sums

    def push(client: int) -> list[bytes]:
        with contextlib.closing(pair.connect()) as store:
            pushed: list[bytes] = []
            while not is_over.is_set():
                value = b"%d %d" % (client, len(pushed))
                store.queue_push("queue", value, capacity=5)
                pushed.append(value)
            return pushed

    def pop() -> list[bytes]:
        with contextlib.closing(pair.connect()) as store:
            popped: list[bytes] = []
            while (value := store.queue_pop("queue")) != b"end":
                popped.append(value)
            return popped

    with ThreadPoolExecutor(3 * num_clients) as pool:
        sums = [pool.submit(add) for _ in range(num_clients)]
        pushes = [pool.submit(push, client) for client in range(num_clients)]
        pops = [pool.submit(pop) for _ in range(num_clients)]
        pushed = [value for each in pushes for value in each.result()]
        for _ in range(num_clients):
            pair.store.queue_push("queue", b"end")
        return (
            [number for each in sums for number in each.result()],
            pushed,
            [value for each in pops for value in each.result()],
        )


def check_hammered(pair: Pair, sums: list[int], pushed: list[bytes], popped: list[bytes]) -> None:
    assert sorted(sums) == list(range(1, len(sums) + 1))
    assert pair.store.get("sum") == b"%d" % len(sums)
    assert sorted(popped) == sorted(pushed)
    assert pair.store.queue_len("queue") == 0


def test_nothing_acknowledged_is_lost_and_nothing_is_done_twice(pair: Pair) -> None:
    pair.wait_until_ready()
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        hammered = pool.submit(hammer, pair, 3, is_over)
        time.sleep(0.5)
        num_before = int(pair.store.get("sum"))
        pair.kill()
        pair.store.wait(["sum"])
        # It goes on at the other address.
        pair.store.set("after", b"")
        time.sleep(0.3)
        is_over.set()
        sums, pushed, popped = hammered.result(SOON_S)
    check_hammered(pair, sums, pushed, popped)
    assert len(sums) > num_before > 0
    assert pair.store.addresses == ((HOST, pair.standby.port), None)


def test_over_tls_as_well(tmp_path: Path) -> None:
    certificates = Authority(tmp_path).issue(asks_clients=True)
    with contextlib.closing(Pair(ENGINES[0], certificates)) as pair:
        pair.wait_until_ready()
        assert pair.store.add("sum", 1) == 1
        pair.kill()
        assert pair.store.add("sum", 1) == 2


def test_who_waits_goes_on_waiting_at_the_standby(pair: Pair) -> None:
    pair.wait_until_ready()
    waiting = [pair.connect() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        gets = [pool.submit(store.get, "late") for store in waiting[:2]]
        popped = pool.submit(waiting[2].queue_pop, "jobs")
        time.sleep(0.2)
        pair.kill()
        pair.store.set("late", b"1")
        pair.store.queue_push("jobs", b"2")
        assert [get.result(SOON_S) for get in gets] == [b"1", b"1"]
        assert popped.result(SOON_S) == b"2"
    for store in waiting:
        store.close()


def test_who_asked_nothing_since_the_standby_came_finds_it(one_pair: Pair) -> None:
    silent = one_pair.store  # connected when there was no standby
    with contextlib.closing(one_pair.connect()) as other:
        one_pair.wait_until_ready(store=other)
        one_pair.kill()
        assert silent.addresses == ((HOST, one_pair.leader.port), None)
        with contextlib.closing(silent.clone()) as clone:
            clone.set("key", b"value")
        assert silent.address()[:2] == [HOST, one_pair.standby.port]
        assert other.get("key") == b"value"


def test_a_large_state_is_all_there(one_pair: Pair) -> None:
    with contextlib.closing(one_pair.connect()) as store:
        values = {f"key{number}": os.urandom(1 << 20) for number in range(24)}
        for key, value in values.items():
            store.set(key, value)
    one_pair.wait_until_ready()
    one_pair.kill()
    assert dict(zip(values, one_pair.store.multi_get(list(values)), strict=True)) == values


def test_a_state_with_many_values_is_all_there_where_frames_are_small() -> None:
    limits = Limits(key_bytes=1 << 10, value_bytes=16 << 10, frame_bytes=32 << 10)
    with contextlib.closing(Pair(ENGINES[0], limits=limits)) as pair:
        for number in range(100):
            pair.store.set(f"key{number}", bytes(1000))
        pair.standby.close()
        pair.standby = pair.add_standby(ENGINES[0])
        pair.wait_until_ready()
        pair.kill()
        assert pair.store.num_keys() == 101


def test_a_second_standby_costs_the_leader_next_to_nothing(one_pair: Pair) -> None:
    one_pair.wait_until_ready()
    with contextlib.closing(one_pair.add_standby(ENGINES[0])):
        time.sleep(1.0)
        assert one_pair.store.addresses[1] == (HOST, one_pair.standby.port)
        one_pair.kill()
        assert one_pair.store.add("sum", 1) == 1


def test_one_that_was_killed_and_followed_by_another_may_be_killed_again(one_pair: Pair) -> None:
    one_pair.wait_until_ready()
    assert one_pair.store.add("sum", 1) == 1
    one_pair.kill()
    assert one_pair.store.add("sum", 1) == 2
    one_pair.leader.close()
    one_pair.leader = one_pair.standby
    one_pair.standby = one_pair.add_standby(ENGINES[-1])
    one_pair.wait_until_ready()
    one_pair.kill()
    assert one_pair.store.add("sum", 1) == 3


def test_a_leader_goes_on_without_a_standby_that_was_killed(one_pair: Pair) -> None:
    one_pair.wait_until_ready()
    os.kill(one_pair.standby.pid, signal.SIGKILL)
    began_s = time.monotonic()
    assert one_pair.store.add("sum", 1) == 1
    assert PATIENCE_S / 2 < time.monotonic() - began_s < SOON_S / 2
    # The news come behind that answer.
    assert one_pair.store.add("sum", 1) == 2
    assert one_pair.store.addresses[1] is None
    one_pair.standby.close()
    one_pair.standby = one_pair.add_standby(ENGINES[0])
    one_pair.wait_until_ready()


def test_a_standby_that_is_let_go_says_so(one_pair: Pair) -> None:
    one_pair.wait_until_ready()
    one_pair.standby.close()
    one_pair.store.set_timeout(PATIENCE_S / 2)
    assert one_pair.store.add("sum", 1) == 1


def test_a_frozen_standby_is_left_behind_and_does_not_take_over(one_pair: Pair) -> None:
    one_pair.wait_until_ready()
    freeze(one_pair.standby.pid)
    assert one_pair.store.add("sum", 1) == 1
    one_pair.kill()
    os.kill(one_pair.standby.pid, signal.SIGCONT)
    with pytest.raises((StoreConnectionError, StoreTimeoutError)):
        one_pair.store.add("sum", 1)
    # It ends rather than answer with what is out of date.
    with pytest.raises(StoreConnectionError):
        TCPStore(HOST, one_pair.standby.port, timeout=2.0, token=TOKEN)


def test_a_frozen_leader_is_waited_for(one_pair: Pair) -> None:
    one_pair.wait_until_ready()
    freeze(one_pair.leader.pid)
    time.sleep(1.5 * PATIENCE_S)
    os.kill(one_pair.leader.pid, signal.SIGCONT)
    assert one_pair.store.add("sum", 1) == 1
    assert one_pair.store.addresses[0] == (HOST, one_pair.leader.port)
    one_pair.wait_until_ready()


@pytest.fixture
def electors(one_pair: Pair) -> Iterator[list[Elector]]:
    """One for each of three nodes."""
    one_pair.wait_until_ready()
    stores = [one_pair.connect() for _ in range(3)]
    electors = [Elector(store) for store in stores]
    for elector in electors:
        elector.start()
    # They make themselves known, and the standby has to know them.
    time.sleep(4 * BEAT_S)
    yield electors
    for elector in electors:
        elector.close()
    for store in stores:
        store.close()


def test_a_silent_leader_is_replaced_when_most_have_lost_it(one_pair: Pair, electors: list[Elector]) -> None:
    assert one_pair.store.add("sum", 1) == 1
    with contextlib.closing(one_pair.connect()) as waiting, ThreadPoolExecutor(1) as pool:
        popped = pool.submit(waiting.queue_pop, "queue")
        freeze(one_pair.leader.pid)
        with contextlib.closing(TCPStore(HOST, one_pair.standby.port, timeout=SOON_S, token=TOKEN)) as store:
            assert store.add("sum", 1) == 2
            # The old leader finds that it is one no more, and its clients go where the others are.
            os.kill(one_pair.leader.pid, signal.SIGCONT)
            store.queue_push("queue", b"1")
            assert popped.result(SOON_S) == b"1"
            assert one_pair.store.add("sum", 1) == 3
            assert one_pair.store.addresses[0] == (HOST, one_pair.standby.port)
    assert gone(one_pair.leader.pid)


def test_a_silent_leader_is_not_replaced_when_most_still_have_it(one_pair: Pair, electors: list[Elector]) -> None:
    """The standby alone has lost it; the leader goes on with the electors' consent."""
    freeze(one_pair.standby.pid)
    began_s = time.monotonic()
    assert one_pair.store.add("sum", 1) == 1
    assert time.monotonic() - began_s < PATIENCE_S + 4 * BEAT_S + SOON_S / 2
    os.kill(one_pair.standby.pid, signal.SIGCONT)
    one_pair.wait_until_ready()
    assert one_pair.store.addresses[0] == (HOST, one_pair.leader.port)


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    # All of its threads have stopped; without this the standby may still acknowledge something.
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def gone(pid: int) -> bool:
    try:
        return bool(select.select([os.pidfd_open(pid)], [], [], SOON_S)[0])
    except ProcessLookupError:
        return True


def test_both_gone_is_said_at_once(one_pair: Pair) -> None:
    one_pair.wait_until_ready()
    os.kill(one_pair.standby.pid, signal.SIGKILL)
    one_pair.kill()
    with pytest.raises(StoreConnectionError, match="nobody listens there any more"):
        one_pair.store.add("sum", 1)
