"""What a job's start asks of the store: N clients connect, publish an address each, read everybody's, meet.

    python benchmarks/store_startup.py [--clients 500] [--rounds 7] [--simulated 100000]

The clients are threads of a few processes. In torch, "get" reads the addresses one by one, as its transports do;
"multi_get" waits for all keys and asks for their values together, the best that its interface allows. Its barrier is
a counter and a key that all wait for. torch looks up each peer's name in the DNS; where no DNS answers, that alone
takes seconds, so measure where `hosts` in nsswitch.conf is `files` only. Sides take turns; times are from the signal
to start until the last client is through, in the slowest process. Then the server's state machine alone, without
sockets: the same start with 100,000 simulated clients, which each wait for their right neighbour's key and meet at a
barrier. Writes benchmarks/results/store_startup.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from disttrain.store import TCPStore, spawn_server
from disttrain.store.state import StoreState
from disttrain.store.wire import Op

HOST = "127.0.0.1"
TIMEOUT_S = 120.0
NUM_PROCESSES = 2
RESULTS = Path(__file__).parent / "results" / "store_startup.json"
TORCH_SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def address(rank: int) -> str:
    return f"10.0.{rank >> 8}.{rank & 255}:{20_000 + rank}"


def ours(port: int, rank: int, num_clients: int) -> object:
    store = TCPStore(HOST, port, timeout=TIMEOUT_S)
    store.set(f"address/{rank}", address(rank))
    values = store.multi_get([f"address/{peer}" for peer in range(num_clients)])
    store.barrier("start", num_clients)
    assert values[rank] == address(rank).encode()
    return store


def torch_store(port: int) -> Any:
    import torch.distributed  # only where torch is measured

    return torch.distributed.TCPStore(
        HOST, port, None, False, timeout=timedelta(seconds=TIMEOUT_S), wait_for_workers=False
    )


def torch_barrier(store: Any, num_clients: int) -> None:
    if store.add("start", 1) == num_clients:
        store.set("start/done", "")
    store.wait(["start/done"])


def torch_get(port: int, rank: int, num_clients: int) -> object:
    store = torch_store(port)
    store.set(f"address/{rank}", address(rank))
    values = [store.get(f"address/{peer}") for peer in range(num_clients)]
    torch_barrier(store, num_clients)
    assert values[rank] == address(rank).encode()
    return store


def torch_multi_get(port: int, rank: int, num_clients: int) -> object:
    store = torch_store(port)
    store.set(f"address/{rank}", address(rank))
    keys = [f"address/{peer}" for peer in range(num_clients)]
    store.wait(keys)
    values = store.multi_get(keys)
    torch_barrier(store, num_clients)
    assert values[rank] == address(rank).encode()
    return store


Client = Callable[[int, int, int], object]
SIDES: dict[str, Client] = {
    "disttrain (pyuv)": ours,
    "disttrain (uvloop)": ours,
    "torch, multi_get": torch_multi_get,
    "torch, get": torch_get,
}


def run_clients(pipe: Any) -> None:
    """One process: for each (side, port, ranks, num_clients) that comes, all those clients, each in a thread."""
    import torch.distributed  # noqa: F401  here, so that its loading is in nobody's time

    while (task := pipe.recv()) is not None:
        pipe.send(run_once(pipe, *task))


def run_once(pipe: Any, name: str, port: int, ranks: range, num_clients: int) -> float:
    """Seconds from the signal until the last of `ranks` is through."""
    stores: list[object] = []
    go = threading.Event()

    def one(rank: int) -> None:
        go.wait()
        stores.append(SIDES[name](port, rank, num_clients))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    pipe.send("ready")
    pipe.recv()
    started_s = time.perf_counter()
    go.set()
    for thread in threads:
        thread.join()
    taken_s = time.perf_counter() - started_s
    assert len(stores) == len(ranks)
    for store in stores:
        if isinstance(store, TCPStore):
            store.close()
    return taken_s


def start_up_seconds(name: str, pipes: list[Any], num_clients: int) -> float:
    """One start of `num_clients`, on a server of its own."""
    if name.startswith("torch"):
        process = subprocess.Popen([sys.executable, "-c", TORCH_SERVER], stdin=-1, stdout=-1)
        assert process.stdout is not None
        port, end = int(process.stdout.readline()), process.communicate
    else:
        server = spawn_server(HOST, 0, engine=name[name.index("(") + 1 : -1])
        port, end = server.port, server.close  # type: ignore[assignment]
    for number, pipe in enumerate(pipes):
        pipe.send((name, port, range(number, num_clients, len(pipes)), num_clients))
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send("go")
    taken_s = max(pipe.recv() for pipe in pipes)
    end()
    return float(taken_s)


def simulate(num_clients: int, is_traced: bool) -> float:
    """The state machine alone; seconds for all clients, or with `is_traced` the bytes that it held at most."""
    if is_traced:
        tracemalloc.start()
    started_s = time.perf_counter()
    state = StoreState()
    for rank in range(num_clients):
        state.handle(rank, [0, Op.GET, f"address/{(rank + 1) % num_clients}", 300.0], 0.0)
    for rank in range(num_clients):
        state.handle(rank, [1, Op.SET, f"address/{rank}", address(rank).encode()], 0.0)
    num_replies = 0
    for rank in range(num_clients):
        num_replies += len(state.handle(rank, [2, Op.BARRIER, "start", num_clients, 300.0], 0.0))
    taken_s = time.perf_counter() - started_s
    assert num_replies == num_clients
    assert state.num_parked == 0
    if not is_traced:
        return taken_s
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return float(most_bytes)


def commit() -> str | None:
    """The commit that is measured, if this is a repository that has one."""
    answer = subprocess.run(
        ["git", "rev-parse", "HEAD"], check=False, capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return answer.stdout.strip() if answer.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--simulated", type=int, default=100_000)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipes, workers = [], []
    for _ in range(NUM_PROCESSES):
        pipe, other = context.Pipe()
        pipes.append(pipe)
        workers.append(context.Process(target=run_clients, args=(other,)))
        workers[-1].start()
    taken: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(arguments.rounds):
        for name in SIDES:
            taken[name].append(start_up_seconds(name, pipes, arguments.clients))
    for pipe, worker in zip(pipes, workers, strict=True):
        pipe.send(None)
        worker.join()
    medians = {name: statistics.median(times) for name, times in taken.items()}
    for name, median in medians.items():
        ratios = ", ".join(f"{median / medians[twin]:.2f} of {twin}" for twin in medians if twin.startswith("torch"))
        print(f"{name:<20} {median * 1e3:8.1f} ms for {arguments.clients} clients  ({ratios})")
    seconds = min(simulate(arguments.simulated, False) for _ in range(3))
    most_bytes = simulate(arguments.simulated, True)
    microseconds_each, bytes_each = seconds / arguments.simulated * 1e6, most_bytes / arguments.simulated
    print(
        f"state machine, {arguments.simulated} clients: {microseconds_each:.1f} us and {bytes_each:.0f} bytes each "
        "for a get that waits, a set that wakes and a barrier"
    )
    result = {
        "commit": commit(),
        "command": " ".join(["python", *sys.argv]),
        "python": platform.python_version(),
        "machine": {"num_cores": os.cpu_count(), "kernel": platform.release()},
        "num_clients": arguments.clients,
        "median_s": medians,
        "rounds_s": taken,
        "simulated": {
            "num_clients": arguments.simulated,
            "us_per_client": microseconds_each,
            "bytes_per_client": bytes_each,
        },
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
