"""Messages between nodes and node 0: JSON, read back as these values and nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from disttrain_launch.rendezvous.rounds import Assignment, Node
from disttrain_launch.workers.outcome import Changed, Failed, Interrupted, Lost, Outcome, Requeued, Succeeded


@dataclass(frozen=True)
class Came:
    """To node 0: a node wants to take part."""

    node: Node

    @property
    def agent(self) -> str:
        return self.node.agent


@dataclass(frozen=True)
class Ended:
    """To node 0: why a node's workers of this round end. After success none of them is left."""

    agent: str
    round: int
    outcome: Outcome


@dataclass(frozen=True)
class Stopped:
    """To node 0: none of a node's workers of this round is left."""

    agent: str
    round: int


@dataclass(frozen=True)
class Heard:
    """To node 0: the node knows that it is over, and goes."""

    agent: str


@dataclass(frozen=True)
class Happened:
    """To node 0: records for its event log, with which it does nothing else."""

    records: list[dict[str, Any]]


@dataclass(frozen=True)
class Formed:
    """To whoever takes node 0's place: the last round that it formed."""

    round: int
    num_restarts: int
    agents: list[str]
    """Its nodes, by group rank."""


Report = Came | Ended | Stopped | Heard | Happened


@dataclass(frozen=True)
class Run:
    """To a node: start your workers."""

    assignment: Assignment
    num_restarts: int
    torch_port: int = 0
    """On node 0; the shell puts it in."""
    torch_addr: str = ""
    """Of node 0, if another has taken its place; the shell puts it in, too."""


@dataclass(frozen=True)
class Wait:
    """To a node: not yet, and why."""

    reason: str


@dataclass(frozen=True)
class Stop:
    """To a node: stop your workers of this round."""

    round: int
    cause: Outcome


@dataclass(frozen=True)
class Done:
    """To a node: that was all."""

    outcome: Outcome
    note: str = ""
    """Further remarks on the cause."""


@dataclass(frozen=True)
class Refused:
    """To a node: it takes no part."""

    problem: str
    remedy: str


Word = Run | Wait | Stop | Done | Refused
"""Node 0's last word to a node. Who has missed one knows all that matters from the next."""

_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(Came, Ended, Stopped, Heard, Happened, Formed, Run, Wait, Stop, Done, Refused),
        *(Succeeded, Failed, Interrupted, Requeued, Changed, Lost, Node, Assignment),
    )
}


def encode(value: Report | Word | Formed) -> bytes:
    """As JSON."""
    return json.dumps(_to_plain(value)).encode()


def decode(data: bytes) -> Any:
    """The value. Raises ValueError for what is none; fields that are not known (another version's) are left out."""
    try:
        return _from_plain(json.loads(data))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no message: {data[:80]!r}") from error


def _to_plain(value: Any) -> Any:
    if is_dataclass(value):
        return {"kind": type(value).__name__, **{f.name: _to_plain(getattr(value, f.name)) for f in fields(value)}}
    return value


def _from_plain(plain: Any) -> Any:
    if not isinstance(plain, dict):
        return plain
    kind = _KINDS[plain["kind"]]
    return kind(**{f.name: _from_plain(plain[f.name]) for f in fields(kind) if f.name in plain})
