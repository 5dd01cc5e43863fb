"""Records the events of a job, from what nodes told node 0 and what it told them; pure.

`Chronicle` follows along and knows how the job stands, which is what there is to see of it. Records hold numbers, names
and reasons: no arguments, no variables, nothing that a worker printed, since secrets are in these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from disttrain_launch.output.view import JobNode, JobState
from disttrain_launch.rendezvous.messages import Came, Done, Formed, Refused, Run, Stop
from disttrain_launch.rendezvous.rounds import Node, Phase
from disttrain_launch.rendezvous.state import Command, Event, Tell
from disttrain_launch.workers.outcome import (
    Changed,
    Exit,
    Failed,
    Interrupted,
    Lost,
    Outcome,
    Requeued,
    Succeeded,
    signal_name,
)

Record = dict[str, Any]


def happened(event: str, **fields: Any) -> Record:
    """A record of now."""
    time = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return {"time": time, "event": event, **fields}


def cause_of(outcome: Outcome) -> Record:
    """Why a round or the job ends: its `kind`, and what is known of it."""
    match outcome:
        case Succeeded():
            return {"kind": "success"}
        case Failed():
            where = {"rank": outcome.rank, "host": outcome.host, "pid": outcome.pid}
            return {"kind": "worker failed", **where, **exit_fields(Exit(outcome.returncode))}
        case Interrupted(number, _, host):
            return {"kind": "signal", "signal": signal_name(number), "host": host}
        case Requeued(rank, _, host):
            return {"kind": "requeue", "rank": rank, "host": host}
        case Lost(problem):
            return {"kind": "lost", "reason": problem}
        case Changed(change):
            return {"kind": "nodes changed", "reason": change}


def exit_fields(end: Exit) -> Record:
    """`exit_code`, or the name of the `signal`."""
    return {"signal": signal_name(-end.returncode)} if end.returncode < 0 else {"exit_code": end.returncode}


class Chronicle:
    """Args: state  of the job before anything happened;  record  makes a record of a name and fields."""

    def __init__(self, state: JobState, record: Callable[..., Record] = happened) -> None:
        self._state = state
        self._record = record
        self._nodes: dict[str, JobNode] = {}
        self._gone: set[str] = set()
        """Whoever left does not come back: what it had reported before may be repeated."""

    def take_over(self, nodes: Iterable[Node], gone: Iterable[str], formed: Formed | None) -> None:
        """Go on where another cannot: these nodes are there, those agents have gone, `formed` is the last round."""
        for node in nodes:
            self._know(node)
        self._gone.update(gone)
        if formed is not None:
            self._state = replace(self._state, round=formed.round, num_restarts=formed.num_restarts)
            for group_rank, agent in enumerate(formed.agents):
                if agent in self._nodes:
                    self._nodes[agent] = replace(self._nodes[agent], group_rank=group_rank)

    def _know(self, node: Node) -> None:
        self._nodes[node.agent] = JobNode(node.agent, node.host, node.num_local_workers)

    def state(self, phase: Phase, awaited: str) -> JobState:
        """The job's state, with the rendezvous' own."""
        return replace(self._state, phase=phase.name.lower(), awaited=awaited, nodes=tuple(self._nodes.values()))

    def follow(self, event: Event, commands: Iterable[Command]) -> list[Record]:
        """Yields records of this event, which was answered with these commands."""
        words = {command.agent: command.word for command in commands if isinstance(command, Tell)}
        records = []
        if isinstance(event, Came) and not (event.agent in self._nodes or event.agent in self._gone):
            records += self._came(event.node, words.get(event.agent))
        if stop := next((word for word in words.values() if isinstance(word, Stop)), None):
            records.append(self._record("stop", round=stop.round, cause=cause_of(stop.cause)))
        for agent, word in words.items():
            if isinstance(word, Done | Refused):
                records += self._goes(agent, word)
        if runs := {agent: word for agent, word in words.items() if isinstance(word, Run)}:
            records += self._round(runs)
        return records

    def _came(self, node: Node, word: object) -> list[Record]:
        about = {"host": node.host, "node_rank": node.node_rank, "workers": node.num_local_workers}
        if isinstance(word, Refused):
            return [self._record("node_refused", **about, reason=word.problem)]
        if isinstance(word, Done):
            return []  # It comes to a job that is over.
        self._know(node)
        return [self._record("node_joined", **about)]

    def _goes(self, agent: str, word: Done | Refused) -> list[Record]:
        self._gone.add(agent)
        if (node := self._nodes.pop(agent, None)) is None:
            return []
        cause = cause_of(word.outcome) if isinstance(word, Done) else {"kind": "refused", "reason": word.problem}
        return [self._record("node_left", host=node.host, group_rank=node.group_rank, cause=cause)]

    def _round(self, runs: dict[str, Run]) -> list[Record]:
        first = next(iter(runs.values()))
        records = []
        if first.num_restarts > self._state.num_restarts:
            limit = self._state.max_restarts
            records.append(self._record("restart", restart=first.num_restarts, max_restarts=limit))
        self._state = replace(self._state, round=first.assignment.round, num_restarts=first.num_restarts)
        for agent, node in self._nodes.items():
            group_rank = runs[agent].assignment.group_rank if agent in runs else None
            self._nodes[agent] = replace(node, group_rank=group_rank)
        nodes = [
            {
                "group_rank": run.assignment.group_rank,
                "host": self._nodes[agent].host,
                "first_rank": run.assignment.first_rank,
                "workers": self._nodes[agent].num_workers,
            }
            for agent, run in sorted(runs.items(), key=lambda item: item[1].assignment.group_rank)
        ]
        size = first.assignment.world_size
        return [*records, self._record("round_formed", round=first.assignment.round, world_size=size, nodes=nodes)]
