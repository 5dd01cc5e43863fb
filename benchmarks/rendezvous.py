"""Rounds of many nodes in one process: how many messages they take, and how long node 0 needs for them.

    python benchmarks/rendezvous.py [--nodes 100 1000 10000] [--repeats 3]

Node 0's shell is the real one, over a store in memory that counts requests (a request and its answer are one message
here); the nodes are played by this process, which sends what their links would. Beats are left out: they take one
message per node and second whether rounds begin or not. Times are medians of whole rounds, with all nodes' part in
them, so that they are bounds for node 0's.
"""

from __future__ import annotations

import time
from typing import Any

from harness import OURS, command_line, finish, row

from disttrain.store import HashStore
from disttrain_launch.output.events import Chronicle
from disttrain_launch.output.view import JobState
from disttrain_launch.rendezvous.messages import Came, Ended, Report, Run, Stop, Stopped, decode, encode
from disttrain_launch.rendezvous.node0 import REPORTS, ROOM, Leader
from disttrain_launch.rendezvous.rounds import Node, Terms
from disttrain_launch.rendezvous.state import NodeLost, Rendezvous
from disttrain_launch.workers.outcome import Failed

NUM_LOCAL_WORKERS = 8
FAILED = Failed(0, 0, 0, "host", 7, 1, 60.0, "", "")


class CountingStore(HashStore):
    """Counts what it is asked."""

    num_requests = 0

    def _request(self, *arguments: Any) -> Any:
        self.num_requests += 1
        return super()._request(*arguments)


class Job:
    """A job of `num_nodes`, one more at most, and one less at least."""

    def __init__(self, num_nodes: int) -> None:
        self.store = CountingStore()
        terms = Terms(num_nodes - 1, num_nodes + 1, max_restarts=99, last_call_s=0.0)
        self.num_nodes = f"{num_nodes - 1}:{num_nodes + 1}"
        self.machine = Rendezvous(terms, self.node(0), time.monotonic())
        chronicle = Chronicle(JobState("job", 0.0, 99))
        self.leader = Leader(self.store, self.machine, chronicle, list, beat_s=1e6, close_s=1.0, say=print)
        self.heard: dict[str, bytes | None] = {}

    def node(self, number: int) -> Node:
        return Node(f"agent-{number}", number, self.num_nodes, NUM_LOCAL_WORKERS, "1", "run", "d", f"host-{number}")

    def report(self, report: Report) -> None:
        self.store.queue_push(f"{ROOM}/{REPORTS}", encode(report))
        self.leader.step()

    def come(self, number: int) -> None:
        agent = f"agent-{number}"
        self.store.add(f"{ROOM}/beat/{agent}", 1)
        self.heard[agent] = None
        self.report(Came(self.node(number)))

    def hear(self) -> list[tuple[str, Any]]:
        """What each node's watch returns."""
        words = []
        for agent, seen in self.heard.items():
            heard = self.store.watch(f"{ROOM}/word/{agent}", seen, 0.01)
            self.heard[agent] = heard
            words.append((agent, decode(heard or b"")))
        return words

    def run_round(self, num_members: int) -> None:
        runs = [word for _, word in self.hear()]
        assert all(isinstance(word, Run) for word in runs)
        assert sorted(word.place.group_rank for word in runs) == list(range(num_members))

    def stop_round(self) -> None:
        for agent, word in self.hear():
            assert isinstance(word, Stop)
            self.report(Stopped(agent, word.round))

    def lose(self, number: int) -> None:
        self.heard.pop(f"agent-{number}")
        self.leader._carry_out(self.machine.handle(NodeLost(f"agent-{number}"), time.monotonic()))


def play(num_nodes: int) -> dict[str, tuple[int, float]]:
    """(messages, seconds) of each kind of round."""
    job = Job(num_nodes)
    costs = {}

    def measured(name: str, begin: Any, num_members: int, *, is_first: bool = False) -> None:
        num_before, began_s = job.store.num_requests, time.perf_counter()
        begin()
        if not is_first:
            job.stop_round()
        job.run_round(num_members)
        costs[name] = job.store.num_requests - num_before, time.perf_counter() - began_s

    def all_come() -> None:
        # The last call is over as soon as enough are there: so the last of them begins the round.
        job.machine.terms = Terms(num_nodes, num_nodes + 1, max_restarts=99, last_call_s=0.0)
        for number in range(num_nodes):
            job.come(number)
        job.machine.terms = Terms(num_nodes - 1, num_nodes + 1, max_restarts=99, last_call_s=0.0)

    measured("first", all_come, num_nodes, is_first=True)
    measured("a worker fails", lambda: job.report(Ended("agent-3", job.machine._round, FAILED)), num_nodes)
    measured("a node is lost", lambda: job.lose(num_nodes - 1), num_nodes - 1)
    return costs


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--repeats", type=int, default=3)
    flags = parser.parse_args()
    rows = []
    for num_nodes in flags.nodes:
        plays = [play(num_nodes) for _ in range(flags.repeats)]
        for name in plays[0]:
            (num_messages,) = {costs[name][0] for costs in plays}
            case = f"{name}, {num_nodes} nodes"
            rows.append(row(case, "ms", {OURS: [costs[name][1] for costs in plays]}, 1e3))
            rows.append(row(case, "messages per node", {OURS: [num_messages / num_nodes]}))
    finish(rows, flags.json)


if __name__ == "__main__":
    main()
