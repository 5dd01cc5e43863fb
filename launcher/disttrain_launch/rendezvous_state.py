"""How nodes become a job: events in, commands out, no I/O.

Node 0 runs one `Rendezvous` per round. Every node announces itself once; when all have come, each gets its `Place`, in
the order of node ranks. What doesn't fit together (another number of nodes or workers, another version or run, a node
rank taken twice) or a node that never comes ends the round with one `Refuse`, which every node that came gets to read.
The form follows dask's worker state machine: the machine decides, a shell around it talks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """What a node says about itself."""

    node_rank: int
    num_nodes: int
    num_local_workers: int
    version: str
    run_id: str
    digest: str
    """Of script and arguments."""
    host: str
    agent: str
    """Name of the agent; a node that announces itself again is known by it."""

    def __str__(self) -> str:
        return f"node {self.node_rank} ({self.host})"


@dataclass(frozen=True)
class Place:
    """What a node is in a round."""

    group_rank: int
    first_rank: int
    num_nodes: int
    world_size: int


@dataclass(frozen=True)
class Round:
    """A job's processes, numbered."""

    number: int
    num_nodes: int
    num_local_workers: int

    def place(self, node_rank: int) -> Place:
        return Place(
            group_rank=node_rank,
            first_rank=node_rank * self.num_local_workers,
            num_nodes=self.num_nodes,
            world_size=self.num_nodes * self.num_local_workers,
        )


@dataclass(frozen=True)
class NodeCame:
    node: Node


@dataclass(frozen=True)
class JoinTimeOver:
    """The nodes that have not come will not be waited for any longer."""

    waited_s: float


Event = NodeCame | JoinTimeOver


@dataclass(frozen=True)
class Begin:
    """All are here."""

    round: Round
    agents: tuple[str, ...]
    """By node rank. Who reads another's name there came too late."""


@dataclass(frozen=True)
class Refuse:
    """There will be no round."""

    problem: str
    remedy: str


@dataclass(frozen=True)
class Warn:
    text: str


Command = Begin | Refuse | Warn

# Fields in which nodes must agree, and the flag that sets each.
_AGREED = (
    ("num_nodes", "--nnodes"),
    ("num_local_workers", "--nproc-per-node"),
    ("version", "disttrain version"),
    ("run_id", "--rdzv-id"),
)


class Rendezvous:
    """One round, as node 0 sees it; its own coming is an event too. After `Begin` or `Refuse` there is nothing more."""

    def __init__(self, leader: Node, number: int = 0) -> None:
        self._leader = leader
        self._number = number
        self._nodes: dict[int, Node] = {}
        self._absent = set(range(leader.num_nodes))
        self._decided = False

    def handle(self, event: Event) -> list[Command]:
        if self._decided:
            return []
        match event:
            case NodeCame(node):
                return self._came(node)
            case JoinTimeOver(waited_s):
                here = name_nodes(tuple(sorted(self._nodes)))
                return self._refuse(
                    f"{name_nodes(self.absent)} did not come within {waited_s:g} s; {here} did.",
                    "Start disttrain-launch there too, with the same --nnodes, --master-addr and --master-port, or "
                    "wait longer (--join-timeout).",
                )

    @property
    def absent(self) -> tuple[int, ...]:
        """Node ranks that have not come yet."""
        return tuple(sorted(self._absent))

    def _came(self, node: Node) -> list[Command]:
        problem = self._misfit(node)
        if problem:
            return self._refuse(*problem)
        if node.node_rank in self._nodes:
            return []
        self._nodes[node.node_rank] = node
        self._absent.discard(node.node_rank)
        warnings: list[Command] = []
        if node.digest != self._leader.digest:
            warnings.append(Warn(f"{node} runs another script or other arguments than {self._leader}."))
        return warnings + self._begin_if_complete()

    def _misfit(self, node: Node) -> tuple[str, str] | None:
        for name, shown in _AGREED:
            theirs, ours = getattr(node, name), getattr(self._leader, name)
            if theirs != ours:
                problem = f"{node} has {shown} {theirs}, {self._leader} has {ours}; all nodes need the same."
                return problem, "Start all nodes alike."
        if not 0 <= node.node_rank < self._leader.num_nodes:
            return f"{node} is outside --nnodes {self._leader.num_nodes}.", "Number nodes from 0."
        first = self._nodes.get(node.node_rank)
        if first is not None and first.agent != node.agent:
            return f"--node-rank {node.node_rank} was given twice: {first.host} and {node.host}.", (
                "Give each node a rank of its own."
            )
        return None

    def _begin_if_complete(self) -> list[Command]:
        if self._absent:
            return []
        self._decided = True
        numbered = Round(self._number, self._leader.num_nodes, self._leader.num_local_workers)
        return [Begin(numbered, tuple(self._nodes[node_rank].agent for node_rank in range(numbered.num_nodes)))]

    def _refuse(self, problem: str, remedy: str) -> list[Command]:
        self._decided = True
        return [Refuse(problem, remedy)]


def name_nodes(node_ranks: tuple[int, ...], max_shown: int = 8) -> str:
    """`nodes 1, 2 and 14 more`."""
    shown = ", ".join(str(node_rank) for node_rank in node_ranks[:max_shown])
    more = f" and {len(node_ranks) - max_shown} more" if len(node_ranks) > max_shown else ""
    return f"node{'s' if len(node_ranks) > 1 else ''} {shown}{more}"
