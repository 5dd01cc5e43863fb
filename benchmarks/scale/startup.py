"""The start of very many ranks: what it costs the store's server.

    python benchmarks/scale/startup.py [--nodes 64 512 4096] [--quick] [--json FILE]

A start: each rank connects, joins, says where it is, reads its neighbour's address, waits at a barrier, and listens to
two boards. The server is a process of its own, and its time of the processor is measured, since all others wait for
it. Its clients are played by this process, over real connections: "direct", two for each rank; "ours", one for each
node, by the hub of a node's proxy, whose eight ranks speak to it in memory. torch's ranks do the same with what its
store has, one connection each, one after the other. Where this machine has too few descriptors for a side, it has no
figure; see startup_requests.py for both sides of any size.
"""

from __future__ import annotations

import argparse
import gc
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import OURS, TORCH, Row, command_line, finish, row, without_name_servers

from disttrain.store import Limits, spawn_server
from disttrain.store.protocol.handshake import ClientHandshake
from disttrain.store.protocol.wire import Decoder, Op, encode
from disttrain.store.proxy.hub import ProxyHub

HOST = "127.0.0.1"
RANKS_PER_NODE = 8
DIRECT = "direct"
FRAME_BYTES = 1 << 20
WAVE = 256
"""Connections that are made at the same time: a server lets in so many that have proved nothing."""
PORTS_OF_AN_ADDRESS = 20_000
MOST_OF_TORCHS = 5000
"""Ranks: each of them has a client's threads."""
TORCH_SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""

Script = Generator[list[Any], Any, None]


def start_of(rank: int, num_ranks: int) -> Script:
    """What a rank asks, each after the answer to the last."""
    yield [Op.COMPARE_SET, "world/join/terms", b"", b"terms"]
    yield [Op.ADD, f"world/join/rank/{rank}", 1]
    if (yield [Op.ADD, "world/join/num_ranks", 1]) == num_ranks:
        yield [Op.COMPARE_SET, "world/join/verdict", b"", b"ok"]
    yield [Op.WAIT, ["world/join/verdict"], 300.0]
    yield [Op.GET, "world/join/verdict", 300.0]
    yield [Op.SET, f"world/host/{rank}", b"host"]
    yield [Op.SET, f"world/address/{rank}", f"10.0.0.1:{rank}".encode()]
    yield [Op.GET, f"world/address/{(rank + 1) % num_ranks}", 300.0]
    yield [Op.BARRIER, "start", num_ranks, 300.0]


def listening() -> Script:
    """What a rank's witness and recorder ask; there are no answers."""
    yield [Op.WATCH, "witness/board", None, 3600.0]


class Client:
    """A script that is played over one connection; `send` takes frames."""

    def __init__(self, scripts: list[Script], send: Callable[[bytes], object]) -> None:
        self._handshake: ClientHandshake | None = ClientHandshake(None, "")
        self._scripts = scripts
        self._send = send
        self._has_answered = False
        self._decoder = Decoder(FRAME_BYTES)
        self.num_left = 0

    @property
    def is_in(self) -> bool:
        return self._handshake is None

    def received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            if self._handshake is None:
                self._go_on(message[0] % len(self._scripts), message[0], message[2])
            elif not self._has_answered:
                self._has_answered = True
                self._send(encode(self._handshake.answer(message)))
            else:
                self._handshake.conclude(message)
                self._handshake = None

    def begin(self) -> None:
        self.num_left = len(self._scripts)
        for number in range(len(self._scripts)):
            self._go_on(number, number - len(self._scripts), None)

    def _go_on(self, number: int, request_id: int, value: Any) -> None:
        try:
            request = self._scripts[number].send(value)
        except StopIteration:
            self.num_left -= 1
            return
        self._send(encode([request_id + len(self._scripts), *request]))


class Link:
    """A socket to the server, with what is to be sent."""

    def __init__(self, port: int, number: int, selector: selectors.BaseSelector) -> None:
        self.socket = socket.create_connection((HOST, port), source_address=(_source(number), 0))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.received: Callable[[bytes], None] = lambda data: None
        selector.register(self.socket, selectors.EVENT_READ, self)

    def send(self, data: bytes) -> None:
        while data:
            try:
                data = data[self.socket.send(data) :]
            except BlockingIOError:
                time.sleep(0.001)  # the server is busy; it never waits for us


def _source(number: int) -> str:
    return f"127.0.1.{1 + number // PORTS_OF_AN_ADDRESS}"


class Node:
    """A proxy's hub with its link, and the clients of its ranks in memory."""

    def __init__(self, link: Link, ranks: range, num_ranks: int) -> None:
        self._link = link
        self._hub = ProxyHub(None, Limits())
        self._to_hub: deque[tuple[int, bytes]] = deque()
        self._up = Client([], link.send)
        self._decoder = Decoder(FRAME_BYTES)
        link.received = self._received
        self.clients: list[Client] = []
        for rank in ranks:
            for scripts in ([start_of(rank, num_ranks)], [listening(), listening()]):
                connection = len(self.clients)
                self.clients.append(Client(scripts, self._sender(connection)))

    @property
    def is_in(self) -> bool:
        return self._up.is_in

    @property
    def num_left(self) -> int:
        return sum(client.num_left for client in self.clients[::2])

    def begin(self) -> None:
        for connection, client in enumerate(self.clients):
            client.received(self._hub.connected(connection, 0.0)[0][1])
        self._move()
        for client in self.clients:
            client.begin()
        self._move()

    def _sender(self, connection: int) -> Callable[[bytes], None]:
        return lambda data: self._to_hub.append((connection, data))

    def _received(self, data: bytes) -> None:
        if not self._up.is_in:
            self._up.received(data)
            return
        self._hear(self._hub.answered(self._decoder.feed(data)))
        self._move()

    def _move(self) -> None:
        while self._to_hub:
            connection, data = self._to_hub.popleft()
            self._hear(self._hub.received(connection, data, 0.0))
        self._link.send(b"".join(self._hub.forwarding.frames()))

    def _hear(self, actions: list[Any]) -> None:
        for connection, data, reason in actions:
            assert not reason
            self.clients[connection].received(data)


class Played:
    """The clients of one start, and their connections."""

    def __init__(self, port: int, selector: selectors.BaseSelector) -> None:
        self._port = port
        self._selector = selector
        self._links: list[Link] = []

    def nodes(self, num_nodes: int) -> Iterator[Node]:
        """With a proxy each."""
        for first in range(0, num_nodes * RANKS_PER_NODE, RANKS_PER_NODE):
            yield Node(self._link(), range(first, first + RANKS_PER_NODE), num_nodes * RANKS_PER_NODE)

    def ranks(self, num_ranks: int) -> Iterator[Client]:
        """With two connections each."""
        for rank in range(num_ranks):
            for scripts in ([start_of(rank, num_ranks)], [listening(), listening()]):
                link = self._link()
                client = Client(scripts, link.send)
                link.received = client.received
                yield client

    def run(self, parties: Iterator[Any], num_scripts: int) -> None:
        """Let all connect, and then begin; of `num_scripts` that follow each other the first comes to an end."""
        connected = []
        for party in parties:
            connected.append(party)
            if len(connected) % WAVE == 0:
                self._run_until(connected[-WAVE:], lambda one: one.is_in)
        self._run_until(connected, lambda one: one.is_in)
        for party in connected:
            party.begin()
        self._run_until(connected[::num_scripts], lambda one: not one.num_left)

    def close(self) -> None:
        for link in self._links:
            link.socket.close()

    def _link(self) -> Link:
        self._links.append(Link(self._port, len(self._links), self._selector))
        return self._links[-1]

    def _run_until(self, parties: list[Any], is_through: Callable[[Any], bool]) -> None:
        for party in parties:
            while not is_through(party):
                for key, _ in self._selector.select(1.0):
                    data = key.data.socket.recv(1 << 18)
                    assert data, "the server hung up"
                    key.data.received(data)


def played_start(num_nodes: int, *, has_proxies: bool) -> tuple[float, float]:
    """Seconds of the server's processor, and of the clock, for the start of so many nodes."""
    gc.collect()
    gc.freeze()  # Looking through so many clients for cycles would take longer than a server waits for them.
    server = spawn_server(HOST, 0)
    used_s, began_s = _used_s(server.pid), time.perf_counter()
    with selectors.DefaultSelector() as selector:
        played = Played(server.port, selector)
        if has_proxies:
            played.run(played.nodes(num_nodes), 1)
        else:
            played.run(played.ranks(num_nodes * RANKS_PER_NODE), 2)
        taken_s, used_s = time.perf_counter() - began_s, _used_s(server.pid) - used_s
        played.close()
    server.close()
    return used_s, taken_s


def torchs_start(num_ranks: int) -> float:
    """Seconds of the processor of torch's server."""
    import torch.distributed  # only where torch is measured

    process = subprocess.Popen([sys.executable, "-c", TORCH_SERVER], stdin=-1, stdout=-1)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    used_s = _used_s(process.pid)
    stores = [
        torch.distributed.TCPStore(HOST, port, None, False, timeout=timedelta(seconds=300), wait_for_workers=False)
        for _ in range(num_ranks)
    ]
    for rank, store in enumerate(stores):
        if store.add("join/num_ranks", 1) == num_ranks:
            store.set("join/all", "")
        store.set(f"address/{rank}", f"10.0.0.1:{rank}")
    for rank, store in enumerate(stores):
        store.wait(["join/all"])
        store.get(f"address/{(rank + 1) % num_ranks}")
        if store.add("start", 1) == num_ranks:
            store.set("start/all", "")
    for store in stores:
        store.wait(["start/all"])
    used_s = _used_s(process.pid) - used_s
    del stores
    process.communicate()
    return used_s


def _used_s(pid: int) -> float:
    """The processor's time of all threads of a process, to the nanosecond."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def rows(quick: bool = False, node_counts: list[int] | None = None) -> list[Row]:
    """All rows; `quick`: of small jobs."""
    without_name_servers()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 500
    found = []
    for num_nodes in node_counts or ([4, 16] if quick else [64, 512, 4096]):
        num_ranks = num_nodes * RANKS_PER_NODE
        num_rounds = 3 if num_nodes <= 64 and not quick else 1
        taken: dict[str, list[tuple[float, float]]] = {OURS: [], DIRECT: []}
        torchs: list[float] = []
        for _ in range(num_rounds):
            taken[OURS].append(played_start(num_nodes, has_proxies=True))
            if 2 * num_ranks < most:
                taken[DIRECT].append(played_start(num_nodes, has_proxies=False))
            if num_ranks < min(most, MOST_OF_TORCHS):
                torchs.append(torchs_start(num_ranks))
        sides = {side: [used_s for used_s, _ in values] for side, values in taken.items() if values}
        if torchs:
            sides[TORCH] = torchs
        case = f"start of {num_nodes} nodes x {RANKS_PER_NODE}"
        found.append(row(f"{case}, processor of the store's server", "ms", sides, 1e3))
        clocks = {side: [clock_s for _, clock_s in values] for side, values in taken.items() if values}
        found.append(row(f"{case}, until all are through, played on one machine", "ms", clocks, 1e3))
    return found


def main() -> None:
    parser: argparse.ArgumentParser = command_line(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+")
    parser.add_argument("--quick", action="store_true")
    flags = parser.parse_args()
    finish(rows(flags.quick, flags.nodes), flags.json)


if __name__ == "__main__":
    main()
