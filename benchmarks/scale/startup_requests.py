"""The start of very many ranks without sockets: the requests that reach the store's server, and its hub's own time.

    python benchmarks/scale/startup_requests.py [--nodes 64 512 4096] [--quick] [--json FILE]

The clients are those of startup.py. The server's hub is in this process too, and the processor's time inside of it is
counted: without the kernel's part, which is most of what a connection costs.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import OURS, Row, command_line, finish, row
from startup import DIRECT, RANKS_PER_NODE, Played

from disttrain.store import Limits
from disttrain.store.serving.hub import Hub


class MemoryLink:
    """A connection to a hub in this process."""

    def __init__(self, number: int, to_hub: deque[tuple[int, bytes]]) -> None:
        self.received: Callable[[bytes], None] = lambda data: None
        self._number = number
        self._to_hub = to_hub

    def send(self, data: bytes) -> None:
        if data:
            self._to_hub.append((self._number, data))


class PlayedInMemory(Played):
    """The same with the server's hub in this process, whose own time is measured, and whose requests are counted."""

    def __init__(self) -> None:
        self._hub = CountingHub()
        self._to_hub: deque[tuple[int, bytes]] = deque()
        self._memory_links: list[MemoryLink] = []
        self.hub_s = 0.0

    @property
    def num_requests(self) -> int:
        return self._hub.num_requests

    def _link(self) -> Any:
        number = len(self._memory_links)
        self._memory_links.append(MemoryLink(number, self._to_hub))
        return self._memory_links[-1]

    def _run_until(self, parties: list[Any], is_through: Callable[[Any], bool]) -> None:
        for number in range(self._hub.num_connected, len(self._memory_links)):
            self._hub.num_connected += 1
            self._ask(self._hub.connected, number, 0.0)
        while self._to_hub:
            self._ask(self._hub.received, *self._to_hub.popleft(), 0.0)
        assert all(map(is_through, parties))

    def _ask(self, ask: Callable[..., list[Any]], *arguments: Any) -> None:
        began_s = time.thread_time()
        actions = ask(*arguments)
        self.hub_s += time.thread_time() - began_s
        for number, data, reason in actions:
            assert not reason
            self._memory_links[number].received(data)


class CountingHub(Hub):
    """Counts the requests of clients."""

    def __init__(self) -> None:
        super().__init__(None, Limits())
        self.num_connected = 0
        self.num_requests = 0

    def _answers(self, connection: int, session: Any, messages: list[Any], now_s: float) -> list[Any]:
        self.num_requests += len(messages)
        return super()._answers(connection, session, messages, now_s)


def hub_start(num_nodes: int, *, has_proxies: bool) -> tuple[float, int]:
    """Seconds of the hub alone, and its requests, for the start of so many nodes."""
    played = PlayedInMemory()
    gc.collect()
    gc.disable()
    if has_proxies:
        played.run(played.nodes(num_nodes), 1)
    else:
        played.run(played.ranks(num_nodes * RANKS_PER_NODE), 2)
    gc.enable()
    return played.hub_s, played.num_requests


def rows(quick: bool = False, node_counts: list[int] | None = None) -> list[Row]:
    """All rows; `quick`: of small jobs."""
    found = []
    for num_nodes in node_counts or ([4, 16] if quick else [64, 512, 4096]):
        case = f"start of {num_nodes} nodes x {RANKS_PER_NODE}"
        num_rounds = 3 if num_nodes <= 64 else 1
        hubs = {
            side: [hub_start(num_nodes, has_proxies=side == OURS) for _ in range(num_rounds)] for side in (OURS, DIRECT)
        }
        own = {side: [hub_s for hub_s, _ in values] for side, values in hubs.items()}
        found.append(row(f"{case}, the server's hub alone, without sockets", "ms", own, 1e3))
        asked = {side: [float(num_requests) for _, num_requests in values[:1]] for side, values in hubs.items()}
        found.append(row(f"{case}, requests to the server", "requests", asked))
    return found


def main() -> None:
    parser: argparse.ArgumentParser = command_line(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+")
    parser.add_argument("--quick", action="store_true")
    flags = parser.parse_args()
    finish(rows(flags.quick, flags.nodes), flags.json)


if __name__ == "__main__":
    main()
