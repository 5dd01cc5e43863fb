"""A view of a running job: node 0 publishes the job's state, each node that of its workers.

Both are values that lie in the job's store as JSON, under `launch/job` and `launch/status/<agent>`; whoever has the
token may look. `Sight` is what one look finds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from disttrain import reports
from disttrain.errors import LaunchError
from disttrain.store.base import Store
from disttrain_launch.request.job import OPERATION

_JOB = "job"
_STATUS = "status/"
RUNNING = "running"

Number = int | float | None
"""None: what was reported is no number."""


@dataclass(frozen=True)
class WorkerState:
    rank: int
    pid: int
    state: str = RUNNING
    """Or how it ended."""
    told_s: float | None = None
    """When it reported last, in seconds since 1970."""
    numbers: Mapping[str, Number] = field(default_factory=dict)
    """The numbers that it reported."""


@dataclass(frozen=True)
class NodeState:
    """The workers of one node, in the round that it took part in last."""

    round: int
    workers: tuple[WorkerState, ...]


@dataclass(frozen=True)
class JobNode:
    agent: str
    host: str
    num_workers: int
    group_rank: int | None = None
    """None: it has no place in this round."""


@dataclass(frozen=True)
class JobState:
    job: str
    started_s: float
    """In seconds since 1970."""
    max_restarts: int
    phase: str = "gathering"
    """Or running, stopping, over."""
    round: int = -1
    num_restarts: int = 0
    nodes: tuple[JobNode, ...] = ()
    awaited: str = ""
    """For whom all wait; empty: for nobody."""


@dataclass(frozen=True)
class Sight:
    """One look at a job; `nodes` by their agents."""

    job: JobState
    nodes: Mapping[str, NodeState]

    def workers(self, agent: str) -> tuple[WorkerState, ...]:
        """A node's workers in the round that runs; none where it has not said."""
        state = self.nodes.get(agent)
        return state.workers if state is not None and state.round == self.job.round else ()

    @property
    def everyone(self) -> list[WorkerState]:
        return [worker for node in self.job.nodes for worker in self.workers(node.agent)]

    def as_json(self) -> dict[str, Any]:
        """For programs: the job's fields, and each node's workers in it. What is not finite is null."""
        nodes = [
            {**asdict(node), "workers": [asdict(each) for each in self.workers(node.agent)]} for node in self._placed
        ]
        for worker in (worker for node in nodes for worker in node["workers"]):
            worker["numbers"] = {name: _finite(value) for name, value in worker["numbers"].items()}
        return {**asdict(self.job), "nodes": nodes}

    @property
    def _placed(self) -> list[JobNode]:
        return sorted(self.job.nodes, key=lambda node: (node.group_rank is None, node.group_rank or 0))


def look(store: Store) -> Sight | None:
    """Reads the state of the job whose store (its `launch` part) this is; None: nobody has published it yet.

    Raises StoreError, and LaunchError where it is said in words of another version.
    """
    if not store.check([_JOB]):
        return None
    try:
        plain = json.loads(store.get(_JOB))
        nodes = tuple(JobNode(**node) for node in plain.pop("nodes"))
        states = store.multi_get([_STATUS + node.agent for node in nodes]) if nodes else []
        states_by_agent = {node.agent: _node_state(state) for node, state in zip(nodes, states, strict=True) if state}
        return Sight(JobState(**plain, nodes=nodes), states_by_agent)
    except (ValueError, TypeError, KeyError):
        problem = "what the job says of itself is not understood."
        raise LaunchError(f"{OPERATION} status", problem, "Ask with the job's own version of disttrain.") from None


def tell_job(store: Store, state: JobState, announced: set[str]) -> None:
    """Say how the job stands. Each node has a place for its state first, so that whoever looks need not wait.

    Args: announced  agents whose place is there; grows.
    """
    for agent in {node.agent for node in state.nodes} - announced:
        store.compare_set(_STATUS + agent, "", "")
        announced.add(agent)
    store.set(_JOB, _encoded(state))


def tell_node(store: Store, agent: str, state: NodeState) -> None:
    """Say how a node's workers are."""
    store.set(_STATUS + agent, _encoded(state))


def _encoded(state: JobState | NodeState) -> bytes:
    return json.dumps(asdict(state)).encode()


def _node_state(data: bytes) -> NodeState:
    plain = json.loads(data)
    return NodeState(plain["round"], tuple(WorkerState(**worker) for worker in plain["workers"]))


def combined(numbers: Iterable[Mapping[str, Number]]) -> dict[str, tuple[float, float] | None]:
    """Combines the numbers of several ranks, by name: for `step` to the lowest and the highest, for `..._per_s` to the
    sum, for others to the mean, each twice. None: what is no number."""
    by_name: dict[str, list[Number]] = {}
    for reported in numbers:
        for name, value in reported.items():
            by_name.setdefault(name, []).append(value)
    return {name: _combined(name, values) for name, values in by_name.items()}


def _combined(name: str, values: list[Number]) -> tuple[float, float] | None:
    values_known = [value for value in values if value is not None]
    if not values_known:
        return None
    if name == "step":
        return min(values_known), max(values_known)
    total = reports.combined(name, values_known)
    return total, total


def _finite(value: Number) -> Number:
    return value if value is not None and float("-inf") < value < float("inf") else None
