"""The store against torch's: the same operations in the same run, taken in turns, medians.

    python benchmarks/store.py [--rounds 30] [--engines pyuv uvloop]

Each server is a process of its own on loopback; torch's is its libuv TCPStore. "floor" is a bare round trip over a TCP
connection between two processes: what the machine itself takes. torch has no barrier: its twin adds to a counter, and
the last one sets the key that all wait for. A set of torch's does not wait for an answer; "set and get" compares like
with like. Writes benchmarks/results/store.json.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from disttrain.store import ServerProcess, TCPStore, spawn_server

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
NUM_KEYS = 64
NUM_MEMBERS = 8
BARRIERS_PER_ROUND = 10
CALLS_PER_ROUND = 200
CONNECTS_PER_ROUND = 20
KEYS = [f"key{number}" for number in range(NUM_KEYS)]
VALUES = ["0123456789abcdef"] * NUM_KEYS
RESULTS = Path(__file__).parent / "results" / "store.json"

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

    def close(self) -> None:
        self._process.communicate()


class Ours:
    """disttrain's store on one engine."""

    def __init__(self, engine: str) -> None:
        self.name = f"disttrain ({engine})"
        self._server: ServerProcess = spawn_server(HOST, 0, engine=engine)
        self.store = self.connect()
        self.members = [self.connect() for _ in range(NUM_MEMBERS)]

    def connect(self) -> TCPStore:
        return TCPStore(HOST, self._server.port, timeout=TIMEOUT_S)

    def connect_and_leave(self) -> None:
        self.connect().close()

    def barrier(self, member: int, number: int) -> None:
        self.members[member].barrier(f"barrier{number}", NUM_MEMBERS)

    def close(self) -> None:
        for store in (self.store, *self.members):
            store.close()
        self._server.close()


class Torchs:
    """torch's store, and what its users write for a barrier."""

    def __init__(self) -> None:
        self.name = "torch"
        self._server = Child(TORCH_SERVER)
        self.store = self.connect()
        self.members = [self.connect() for _ in range(NUM_MEMBERS)]

    def connect(self) -> Any:
        return torch.distributed.TCPStore(
            HOST, self._server.port, None, False, timeout=timedelta(seconds=TIMEOUT_S), wait_for_workers=False
        )

    def connect_and_leave(self) -> None:
        self.connect()

    def barrier(self, member: int, number: int) -> None:
        store = self.members[member]
        if store.add(f"barrier{number}", 1) == NUM_MEMBERS:
            store.set(f"barrier{number}/done", "")
        store.wait([f"barrier{number}/done"])

    def close(self) -> None:
        self._server.close()


Side = Ours | Torchs


def set_and_get(side: Side) -> None:
    side.store.set("key0", VALUES[0])
    side.store.get("key0")


OPERATIONS: dict[str, Callable[[Side], object]] = {
    "set": lambda side: side.store.set("key0", VALUES[0]),
    "get": lambda side: side.store.get("key0"),
    "set and get": set_and_get,
    "add": lambda side: side.store.add("counter", 1),
    f"multi_set of {NUM_KEYS}": lambda side: side.store.multi_set(KEYS, VALUES),
    f"multi_get of {NUM_KEYS}": lambda side: side.store.multi_get(KEYS),
}


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
            side.barrier(member, number)

    threads = [threading.Thread(target=run, args=(member,)) for member in range(NUM_MEMBERS)]
    started_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - started_s) / BARRIERS_PER_ROUND * 1e6


def measure(sides: list[Side], num_rounds: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds per case, side and round; each round goes through all cases, and each case through all sides."""
    cases = ["connect", *OPERATIONS, f"barrier of {NUM_MEMBERS}"]
    taken: dict[str, dict[str, list[float]]] = {case: {side.name: [] for side in sides} for case in cases}
    for number in range(num_rounds):
        for side in sides:
            taken["connect"][side.name].append(microseconds(side.connect_and_leave, CONNECTS_PER_ROUND))
        for case, operation in OPERATIONS.items():
            for side in sides:
                taken[case][side.name].append(microseconds(functools.partial(operation, side), CALLS_PER_ROUND))
        for side in sides:
            taken[cases[-1]][side.name].append(barrier_microseconds(side, number * BARRIERS_PER_ROUND))
    return taken


def floor_microseconds() -> float:
    """A bare round trip of 30 bytes."""
    echo = Child(ECHO)
    with socket.create_connection((HOST, echo.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trip = microseconds(lambda: (connection.sendall(b"x" * 30), connection.recv(100)), CALLS_PER_ROUND * 10)
    echo.close()
    return trip


def table(taken: dict[str, dict[str, list[float]]], floor_us: float) -> str:
    """Medians in microseconds, and ours over torch's."""
    names = list(next(iter(taken.values())))
    heads = [head for name in names for head in ([name] if name == "torch" else [name, "ratio"])]
    rows = [f"{'us, median':<18}" + "".join(f"{head:>20}" for head in heads)]
    for case, sides in taken.items():
        medians = {name: statistics.median(times) for name, times in sides.items()}
        cells = []
        for name, median in medians.items():
            cells.append(f"{median:20.1f}")
            if name != "torch":
                cells.append(f"{median / medians['torch']:20.2f}")
        rows.append(f"{case:<18}" + "".join(cells))
    return "\n".join([*rows, f"floor: {floor_us:.1f} us for a bare loopback round trip"])


def commit() -> str | None:
    """The commit that is measured, if this is a repository that has one."""
    answer = subprocess.run(
        ["git", "rev-parse", "HEAD"], check=False, capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return answer.stdout.strip() if answer.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--engines", nargs="+", default=["pyuv", "uvloop"])
    arguments = parser.parse_args()
    sides: list[Side] = [Torchs(), *(Ours(engine) for engine in arguments.engines)]
    for side in sides:
        side.store.multi_set(KEYS, VALUES)
    floor_us = floor_microseconds()
    taken = measure(sides, arguments.rounds)
    for side in sides:
        side.close()
    print(table(taken, floor_us))
    packages = ["disttrain", "torch", "msgpack", "uvloop", "pyuv"]
    found = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    result = {
        "commit": commit(),
        "command": " ".join(["python", *sys.argv]),
        "versions": {"python": platform.python_version(), **{name: found.get(name) for name in packages}},
        "machine": {"num_cores": os.cpu_count(), "kernel": platform.release()},
        "floor_us": floor_us,
        "median_us": {
            case: {name: statistics.median(times) for name, times in sides.items()} for case, sides in taken.items()
        },
        "rounds_us": taken,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
