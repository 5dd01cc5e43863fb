"""What very many ranks ask of their store when something is wrong, and what that costs its server.

    python benchmarks/scale/failures.py [--quick] [--json FILE]

The server's hub is asked, without sockets, by all ranks what they ask it when their time is over, all at the same
moment: its time of the processor is measured, and requests are counted. `a rank alone` is the library's own code.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import OURS, Row, command_line, finish, row

from disttrain.errors import RendezvousError
from disttrain.process_group.joining.rendezvous import RendezvousInfo, join
from disttrain.store import HashStore, Limits
from disttrain.store.protocol.handshake import ClientHandshake
from disttrain.store.protocol.wire import Decoder, Message, Op, encode
from disttrain.store.serving.hub import Hub

FRAME_BYTES = 1 << 20


class Asked:
    """The server's hub, asked without sockets by all ranks; `taken_s` is its time of the processor."""

    def __init__(self, num_ranks: int) -> None:
        self.hub = Hub(None, Limits())
        self.num_requests = 0
        self.taken_s = 0.0
        gc.collect()
        gc.freeze()
        for rank in range(num_ranks):
            handshake = ClientHandshake(None, "")
            hello = Decoder(FRAME_BYTES).feed(self.hub.connected(rank + 1, 0.0)[0][1])[0]
            self.hub.received(rank + 1, encode(handshake.answer(hello)), 0.0)

    def ask(self, rank: int, *request: Any, now_s: float = 0.0) -> list[Message]:
        self.num_requests += 1
        frame = encode([self.num_requests, *request])
        began_s = time.process_time()
        actions = self.hub.received(rank + 1, frame, now_s)
        self.taken_s += time.process_time() - began_s
        return [message for _, data, _ in actions for message in Decoder(1 << 30).feed(data)]

    def tick(self, now_s: float) -> None:
        began_s = time.process_time()
        self.hub.tick(now_s)
        self.taken_s += time.process_time() - began_s


def one_that_never_joins(num_ranks: int) -> tuple[float, float]:
    """The hub's seconds from the end of the wait on, and requests of a rank, when all time out at the same moment."""
    asked = Asked(num_ranks - 1)
    for rank in range(num_ranks - 1):
        asked.ask(rank, Op.ADD, f"join/rank/{rank}", 1)
        asked.ask(rank, Op.WAIT, ["join/verdict"], 300.0)
    asked.num_requests, asked.taken_s = 2 * num_ranks, 0.0
    asked.tick(301.0)
    for rank in range(num_ranks - 1):
        asked.ask(rank, Op.ADD, "join/verdict/tries/0", 1, now_s=301.0)
        if rank:
            asked.ask(rank, Op.WAIT, ["join/verdict"], 5.0, now_s=301.0)
    asked.ask(0, Op.LIST_KEYS, "join/rank/")
    asked.ask(0, Op.COMPARE_SET, "join/verdict", b"", b"ranks had not come")
    for rank in range(num_ranks - 1):
        asked.ask(rank, Op.GET, "join/verdict", 5.0)
    return asked.taken_s, (asked.num_requests - 2 * num_ranks) / num_ranks


def time_out_of_a_collective(num_ranks: int) -> tuple[float, float]:
    """As above, for a question to all ranks, and the text that all the others read."""
    asked = Asked(num_ranks)
    for rank in range(num_ranks):
        asked.ask(rank, Op.WATCH, "board", None, 3600.0)
    asked.taken_s, begun = 0.0, asked.num_requests
    for rank in range(num_ranks):
        asked.ask(rank, Op.ADD, "once/tries/0", 1)
        if rank:
            asked.ask(rank, Op.WAIT, ["once"], 5.0)
    asked.ask(0, Op.APPEND, "board", f"?0.1 0:{num_ranks}:1 about\n".encode())
    for rank in range(num_ranks):
        asked.ask(rank, Op.QUEUE_PUSH, "answers", bytes(300), 0, 5.0)
    for _ in range(num_ranks):
        asked.ask(0, Op.QUEUE_POP, "answers", 5.0)
    asked.ask(0, Op.COMPARE_SET, "once", b"", bytes(400))
    for rank in range(1, num_ranks):
        asked.ask(rank, Op.GET, "once", 5.0)
    return asked.taken_s, (asked.num_requests - begun) / num_ranks


def requests_of_one_alone(num_ranks: int) -> int:
    """What one rank asks whose peers never come."""

    class Counting(HashStore):
        num_requests = 0

        def _request(self, *arguments: Any) -> Any:
            Counting.num_requests += 1
            return super()._request(*arguments)

    try:
        join(Counting(), RendezvousInfo(0, num_ranks), 0.01)
    except RendezvousError:
        return Counting.num_requests
    raise AssertionError("nobody else was there")


def rows(quick: bool = False) -> list[Row]:
    """All rows; `quick`: of small jobs."""
    found = []
    for num_ranks in (64, 256) if quick else (1024, 4096, 16_384):
        case = f"one of {num_ranks} ranks never joins"
        taken_s, num_requests = one_that_never_joins(num_ranks)
        found.append(row(f"{case}, server", "ms", {OURS: [taken_s]}, 1e3))
        found.append(row(f"{case}, requests after the time-out", "a rank", {OURS: [num_requests]}))
        found.append(row(f"{case}: requests of a rank alone", "count", {OURS: [requests_of_one_alone(num_ranks)]}))
        case = f"a collective of {num_ranks} ranks times out"
        taken_s, num_requests = time_out_of_a_collective(num_ranks)
        found.append(row(f"{case}, server", "ms", {OURS: [taken_s]}, 1e3))
        found.append(row(f"{case}, requests", "a rank", {OURS: [num_requests]}))
    return found


def main() -> None:
    parser: argparse.ArgumentParser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true")
    flags = parser.parse_args()
    finish(rows(flags.quick), flags.json)


if __name__ == "__main__":
    main()
