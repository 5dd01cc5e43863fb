"""Rounds as values: who takes part in one, which ranks its workers have, and what a job's terms are."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Phase(enum.Enum):
    """The phase of a job."""

    GATHERING = enum.auto()
    RUNNING = enum.auto()
    STOPPING = enum.auto()
    OVER = enum.auto()


@dataclass(frozen=True)
class Node:
    """A node's description of itself. One of another version may say less or more."""

    agent: str
    """Name of its agent, by which the node is known; a launcher that is started again is another one."""
    node_rank: int | None = None
    """The number that it was given, if any."""
    num_nodes: str = ""
    """The number of nodes that it was told: `4`, or `2:4`."""
    num_local_workers: int = 0
    version: str = ""
    run_id: str = ""
    digest: str = ""
    """Of script and arguments; empty where nodes may differ in them."""
    host: str = ""
    keep_alive: str = ""
    """The interval of its heartbeats, and the number that may be missed."""
    stop_s: float = 60.0
    """The longest that it takes to stop its workers, as it was told."""

    def __str__(self) -> str:
        return f"the node on {self.host}" if self.node_rank is None else f"node {self.node_rank} ({self.host})"


@dataclass(frozen=True)
class Terms:
    """The job's limits, as node 0 was told."""

    min_nodes: int
    max_nodes: int
    max_restarts: int = 0
    join_timeout_s: float = 300.0
    """The time that too few nodes wait for more."""
    last_call_s: float = 30.0
    """The time that enough nodes wait for more."""
    keep_alive_s: float = 8.0
    """A node whose beat stands still for so long is lost."""
    max_quick_failures: int = 3
    """So many failures in a row, each soon after the start, are not followed by another start; 0: any number is."""

    @property
    def is_elastic(self) -> bool:
        """True when nodes may leave and others join."""
        return self.min_nodes < self.max_nodes

    @property
    def survives_losses(self) -> bool:
        """True when the job goes on, or waits, when a node is lost."""
        return self.is_elastic or self.max_restarts > 0


@dataclass(frozen=True)
class Assignment:
    """A node's ranks in a round."""

    round: int
    group_rank: int
    first_rank: int
    num_nodes: int
    world_size: int


def assign_ranks(
    round: int, group_ranks: Mapping[str, int], num_local_workers: Mapping[str, int]
) -> dict[str, Assignment]:
    """Numbers the ranks of each agent, one after another in the order of group ranks, however many each node has."""
    world_size = sum(num_local_workers[agent] for agent in group_ranks)
    assignments = {}
    first_rank = 0
    for agent, group_rank in sorted(group_ranks.items(), key=lambda item: item[1]):
        assignments[agent] = Assignment(round, group_rank, first_rank, len(group_ranks), world_size)
        first_rank += num_local_workers[agent]
    return assignments


def name_nodes(node_ranks: tuple[int, ...], max_shown: int = 8) -> str:
    """`nodes 1, 2 and 14 more`."""
    shown = ", ".join(str(node_rank) for node_rank in node_ranks[:max_shown])
    more = f" and {len(node_ranks) - max_shown} more" if len(node_ranks) > max_shown else ""
    return f"node{'s' if len(node_ranks) > 1 else ''} {shown}{more}"
