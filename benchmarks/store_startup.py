"""What a job's start asks of the store: N clients connect, publish an address each, read everybody's, meet.

    python benchmarks/store_startup.py [--clients 500] [--rounds 7] [--simulated 100000]

The clients are threads of a few processes. torch's transports read the addresses "one by one"; "torch" is multi_get: it
waits for all keys and asks for their values together, the best that its interface allows. Its barrier is
a counter and a key that all wait for. torch's server looks up each peer's name: here that asks no DNS, which might not
answer. Sides take turns; times are from the signal to start until the last client is through, in the slowest process.
Then the server's state machine alone, without sockets: the same start with 100,000 simulated clients, which each wait
for their right neighbour's key and meet at a barrier.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from harness import OURS, TORCH, command_line, finish, row, without_name_servers

from disttrain.store import TCPStore, spawn_server
from disttrain.store.protocol.state import StoreState
from disttrain.store.protocol.wire import Op

HOST = "127.0.0.1"
TIMEOUT_S = 120.0
NUM_PROCESSES = 2
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
    OURS: ours,
    "ours, uvloop": ours,
    TORCH: torch_multi_get,
    "torch, one by one": torch_get,
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
    if name.startswith(TORCH):
        process = subprocess.Popen([sys.executable, "-c", TORCH_SERVER], stdin=-1, stdout=-1)
        assert process.stdout is not None
        port, end = int(process.stdout.readline()), process.communicate
    else:
        server = spawn_server(HOST, 0, engine="pyuv" if name == OURS else "uvloop")
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


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--simulated", type=int, default=100_000)
    arguments = parser.parse_args()
    without_name_servers()
    context = multiprocessing.get_context("spawn")
    pipes, workers = [], []
    for _ in range(NUM_PROCESSES):
        pipe, other = context.Pipe()
        pipes.append(pipe)
        workers.append(context.Process(target=run_clients, args=(other,)))
        workers[-1].start()
        # Nobody else has it then: when the process ends, `recv` says so.
        other.close()
    taken: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(arguments.rounds):
        for name in SIDES:
            taken[name].append(start_up_seconds(name, pipes, arguments.clients))
    for pipe, worker in zip(pipes, workers, strict=True):
        pipe.send(None)
        worker.join()
    simulated_s = [simulate(arguments.simulated, False) for _ in range(3)]
    most_bytes = simulate(arguments.simulated, True)
    each = 1 / arguments.simulated
    rows = [
        row(f"start of {arguments.clients} clients", "ms", taken, 1e3),
        row(f"state machine, {arguments.simulated} clients, each", "us", {OURS: simulated_s}, 1e6 * each),
        row(f"state machine, {arguments.simulated} clients, each", "bytes", {OURS: [most_bytes]}, each),
    ]
    finish(rows, arguments.json)


if __name__ == "__main__":
    main()
