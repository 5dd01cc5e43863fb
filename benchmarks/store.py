"""The store against torch's: the same operations in the same run, taken in turns, medians.

    python benchmarks/store.py [--rounds 30] [--engines pyuv uvloop]

Each server is a process of its own on loopback; torch's is its libuv TCPStore. Left to itself the kernel has a client
and its server share a core, or not, for seconds on end, and waking the other core takes longer than all the rest: both
are measured. "floor" is a bare round trip over a TCP connection between two processes: what the machine itself takes.
torch has no barrier: its counterpart adds to a counter, and the last one sets the key that all wait for. torch's set
does not wait for an answer; "set and get" compares like with like. torch's server looks up each peer's name, which its
connects wait for: here that asks no DNS, which might not answer. The crowd's clients are threads of two processes; its
times are those of the last client, and go with the CPU time that the server took.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from harness import OURS, TORCH, command_line, finish, row, without_name_servers

from disttrain.store import ServerProcess, TCPStore, spawn_server

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
NUM_KEYS = 64
NUM_MEMBERS = 8
NUM_PROCESSES = 2
NUM_CROWD = 200
NUM_CONNECTS = 1000
SETTLE_S = 0.5
BARRIERS_PER_ROUND = 10
CALLS_PER_ROUND = 200
CONNECTS_PER_ROUND = 20
KEYS = [f"key{number}" for number in range(NUM_KEYS)]
VALUES = ["0123456789abcdef"] * NUM_KEYS

TORCH_SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
ECHO = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while data := connection.recv(100):
    connection.sendall(data)
"""


class Child:
    """A Python process that prints a port and ends with its stdin."""

    def __init__(self, code: str) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.pid = self._process.pid

    def close(self) -> None:
        self._process.communicate()


def connect(name: str, port: int) -> Any:
    """A client of the server of that name."""
    if name == TORCH:
        return torch.distributed.TCPStore(
            HOST, port, None, False, timeout=timedelta(seconds=TIMEOUT_S), wait_for_workers=False
        )
    return TCPStore(HOST, port, timeout=TIMEOUT_S)


def meet(store: Any, key: str, num_members: int) -> None:
    """A barrier; torch's users write theirs themselves."""
    if isinstance(store, TCPStore):
        store.barrier(key, num_members)
        return
    if store.add(key, 1) == num_members:
        store.set(f"{key}/done", "")
    store.wait([f"{key}/done"])


class Floor:
    """What the machine takes for a round trip of 30 bytes between two processes."""

    def __init__(self) -> None:
        self.name = "floor"
        self.server = Child(ECHO)
        self._connection = socket.create_connection((HOST, self.server.port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def trip(self) -> None:
        self._connection.sendall(b"x" * 30)
        self._connection.recv(100)

    def close(self) -> None:
        self._connection.close()
        self.server.close()


class Ours:
    """disttrain's store on one engine."""

    def __init__(self, name: str, engine: str) -> None:
        self.name = name
        self.server: ServerProcess = spawn_server(HOST, 0, engine=engine)
        self.store = connect(self.name, self.server.port)
        self.members = [connect(self.name, self.server.port) for _ in range(NUM_MEMBERS)]

    def connect_and_leave(self) -> None:
        connect(self.name, self.server.port).close()

    def close(self) -> None:
        for store in (self.store, *self.members):
            store.close()
        self.server.close()


class Torchs:
    """torch's store."""

    def __init__(self) -> None:
        self.name = TORCH
        self.server = Child(TORCH_SERVER)
        self.store = connect(self.name, self.server.port)
        self.members = [connect(self.name, self.server.port) for _ in range(NUM_MEMBERS)]

    def connect_and_leave(self) -> None:
        connect(self.name, self.server.port)

    def close(self) -> None:
        self.server.close()


Side = Ours | Torchs


def set_and_get(side: Side) -> None:
    side.store.set("key0", VALUES[0])
    side.store.get("key0")


OPERATIONS: dict[str, Callable[[Side], object]] = {
    "connect": lambda side: side.connect_and_leave(),
    "set": lambda side: side.store.set("key0", VALUES[0]),
    "get": lambda side: side.store.get("key0"),
    "set and get": set_and_get,
    "add": lambda side: side.store.add("counter", 1),
    f"multi_set of {NUM_KEYS}": lambda side: side.store.multi_set(KEYS, VALUES),
    f"multi_get of {NUM_KEYS}": lambda side: side.store.multi_get(KEYS),
}


def places() -> dict[str, tuple[int, int]]:
    """Where a client and its server may run: a core for each."""
    first, *others = sorted(os.sched_getaffinity(0))
    found = {"one core": (first, first)}
    if others:
        found["two cores"] = (first, others[0])
    return found


@contextmanager
def placed(server: int, cores: tuple[int, int]) -> Iterator[None]:
    """This process, and the one of that pid, on these cores alone."""
    all_cores = os.sched_getaffinity(0)
    try:
        for pid, core in zip((os.getpid(), server), cores, strict=True):
            _bind(pid, {core})
        yield
    finally:
        for pid in (os.getpid(), server):
            _bind(pid, all_cores)


def _bind(pid: int, cores: set[int]) -> None:
    with suppress(FileNotFoundError):  # whoever asks it something will hear that it has gone
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread.name), cores)


def microseconds(call: Callable[[], object], num_calls: int) -> float:
    """Median time of one call."""
    times = []
    for _ in range(num_calls):
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times) * 1e6


def barrier_microseconds(side: Side, first_number: int) -> float:
    """Time of one barrier of NUM_MEMBERS threads, each with a connection of its own."""

    def run(member: int) -> None:
        for number in range(first_number, first_number + BARRIERS_PER_ROUND):
            meet(side.members[member], f"barrier{number}", NUM_MEMBERS)

    threads = [threading.Thread(target=run, args=(member,)) for member in range(NUM_MEMBERS)]
    started_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - started_s) / BARRIERS_PER_ROUND * 1e6


def measure(sides: list[Side], num_rounds: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds per case, side and round; each round goes through all cases, and each case through all sides."""
    meeting = f"barrier of {NUM_MEMBERS}"
    trips = {place: f"a bare round trip of 30 bytes over loopback, {place}" for place in places()}
    cases = [*(f"{case}, {place}" for case in OPERATIONS for place in places()), meeting]
    taken: dict[str, dict[str, list[float]]] = {case: {side.name: [] for side in sides} for case in cases}
    floor = Floor()
    taken |= {case: {floor.name: []} for case in trips.values()}
    for number in range(num_rounds):
        for place, cores in places().items():
            with placed(floor.server.pid, cores):
                taken[trips[place]][floor.name].append(microseconds(floor.trip, CALLS_PER_ROUND))
        for case, operation in OPERATIONS.items():
            num_calls = CONNECTS_PER_ROUND if case == "connect" else CALLS_PER_ROUND
            for place, cores in places().items():
                for side in sides:
                    with placed(side.server.pid, cores):
                        took_us = microseconds(functools.partial(operation, side), num_calls)
                    taken[f"{case}, {place}"][side.name].append(took_us)
        for side in sides:
            taken[meeting][side.name].append(barrier_microseconds(side, number * BARRIERS_PER_ROUND))
    floor.close()
    return taken


def run_clients(pipe: Any, ports: dict[str, int], num_clients: int) -> None:
    """One process of the crowd: for each (server, case, key) that comes, all of its clients, each in a thread."""
    stores = {name: [connect(name, port) for _ in range(num_clients)] for name, port in ports.items()}
    pipe.send("connected")
    while (task := pipe.recv()) is not None:
        pipe.send(run_once(pipe, stores[task[0]], *task[1:]))


def run_once(pipe: Any, stores: list[Any], case: str, key: str) -> float:
    """When the last of the clients was through."""
    go = threading.Event()

    def run(store: Any) -> None:
        if case == "wait":
            store.wait([key])
        else:
            go.wait()
            meet(store, key, NUM_CROWD)

    threads = [threading.Thread(target=run, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    pipe.send("started")
    if case == "meet":
        pipe.recv()
        go.set()
    for thread in threads:
        thread.join()
    return time.perf_counter()


def crowd_seconds(side: Side, pipes: list[Any], case: str, number: int) -> float:
    """From the `set` that all wait for, or the signal to meet, until the last client is through."""
    key = f"{case}{number}"
    for pipe in pipes:
        pipe.send((side.name, case, key))
    for pipe in pipes:
        pipe.recv()
    # Neither store tells how many wait.
    time.sleep(SETTLE_S)
    started_s = time.perf_counter()
    if case == "wait":
        side.store.set(key, "")
    else:
        for pipe in pipes:
            pipe.send("go")
    # Linux counts perf_counter from the same moment in all processes.
    return float(max(pipe.recv() for pipe in pipes)) - started_s


def connects_seconds(side: Side) -> float:
    """From the first to the last of NUM_CONNECTS connections, all of which stay open."""
    started_s = time.perf_counter()
    stores = [connect(side.name, side.server.port) for _ in range(NUM_CONNECTS)]
    taken_s = time.perf_counter() - started_s
    if side.name != TORCH:
        for store in stores:
            store.close()
    return taken_s


def cpu_seconds(side: Side) -> float:
    """CPU time that the server has taken, in all of its threads."""
    threads = Path(f"/proc/{side.server.pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


CROWD: dict[str, Callable[[Side, list[Any], int], float]] = {
    f"{NUM_CROWD} woken": lambda side, pipes, number: crowd_seconds(side, pipes, "wait", number),
    f"barrier of {NUM_CROWD}": lambda side, pipes, number: crowd_seconds(side, pipes, "meet", number),
    f"{NUM_CONNECTS} connects": lambda side, _pipes, _number: connects_seconds(side),
}


def measure_crowd(sides: list[Side], num_rounds: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds per case, side and round, as `measure`; "server of" a case: the server's CPU time."""
    context = multiprocessing.get_context("spawn")
    ports = {side.name: side.server.port for side in sides}
    pipes, workers = [], []
    for _ in range(NUM_PROCESSES):
        pipe, other = context.Pipe()
        pipes.append(pipe)
        workers.append(context.Process(target=run_clients, args=(other, ports, NUM_CROWD // NUM_PROCESSES)))
        workers[-1].start()
        # Nobody else has it then: when the process ends, `recv` says so.
        other.close()
    for pipe in pipes:
        pipe.recv()
    cases = [name for case in CROWD for name in (case, f"server of {case}")]
    taken: dict[str, dict[str, list[float]]] = {case: {side.name: [] for side in sides} for case in cases}
    for number in range(num_rounds):
        for case, run in CROWD.items():
            for side in sides:
                busy_s = cpu_seconds(side)
                taken[case][side.name].append(run(side, pipes, number) * 1e6)
                taken[f"server of {case}"][side.name].append((cpu_seconds(side) - busy_s) * 1e6)
    for pipe, worker in zip(pipes, workers, strict=True):
        pipe.send(None)
        worker.join()
    return taken


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--engines", nargs="+", default=["pyuv", "uvloop"])
    arguments = parser.parse_args()
    without_name_servers()
    # Children inherit it: torch's server does not ask for more than it is given, and then no longer answers.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sides: list[Side] = [
        Torchs(),
        *(Ours(f"{OURS}, {engine}" if later else OURS, engine) for later, engine in enumerate(arguments.engines)),
    ]
    for side in sides:
        side.store.multi_set(KEYS, VALUES)
    taken = measure(sides, arguments.rounds) | measure_crowd(sides, arguments.rounds)
    for side in sides:
        side.close()
    finish([row(case, "us", times) for case, times in taken.items()], arguments.json)


if __name__ == "__main__":
    main()
