"""Findings: what was looked at, how it is, and what to do about it. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from disttrain.console import table


class State(Enum):
    """The state of a finding: fit, worth a look, or in the way of a job."""

    GOOD = "good"
    DOUBTFUL = "look"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    topic: str
    state: State
    value: str
    """The value that was found."""
    remedy: str = ""
    """The remedy, unless it is good."""

    def to_plain(self) -> list[str]:
        return [self.topic, self.state.value, self.value, self.remedy]

    @classmethod
    def from_plain(cls, row: Sequence[str]) -> Finding:
        topic, state, value, remedy = row
        return cls(topic, State(state), value, remedy)


ALL = "all nodes"
Findings = Mapping[str, Sequence[Finding]]
"""By where: a node, or `ALL`."""


def is_bad(findings: Findings) -> bool:
    return any(finding.state is State.BAD for rows in findings.values() for finding in rows)


def as_text(findings: Findings) -> str:
    """A table, what is alike on several nodes once, and below it what to do, the worst first."""
    rows = [(topic, state.value, value, where) for topic, state, value, where in _folded(findings)]
    text = table(("looked at", "is", "", "where"), rows, words=(0, 1, 2, 3))
    remedies = _remedies(findings)
    if not remedies:
        return f"{text}\n\nnothing is in the way of a job"
    return "\n".join([text, "", "what to do:", *(f"  {number}. {line}" for number, line in enumerate(remedies, 1))])


def as_json(findings: Findings) -> dict[str, Any]:
    rows = [
        {
            "where": where,
            "topic": finding.topic,
            "state": finding.state.value,
            "value": finding.value,
            "remedy": finding.remedy,
        }
        for where, host_findings in findings.items()
        for finding in host_findings
    ]
    return {"is_fit": not is_bad(findings), "findings": rows}


def _folded(findings: Findings) -> list[tuple[str, State, str, str]]:
    wheres: dict[tuple[str, State, str], list[str]] = {}
    for where, host_findings in findings.items():
        for finding in host_findings:
            wheres.setdefault((finding.topic, finding.state, finding.value), []).append(where)
    order = {topic: index for index, topic in enumerate(dict.fromkeys(topic for topic, _, _ in wheres))}
    rows = sorted(wheres.items(), key=lambda item: order[item[0][0]])
    return [(*key, _where(where, findings)) for key, where in rows]


def _remedies(findings: Findings) -> list[str]:
    wheres: dict[tuple[State, str, str], list[str]] = {}
    for where, rows in findings.items():
        for finding in rows:
            if finding.remedy:
                wheres.setdefault((finding.state, finding.topic, finding.remedy), []).append(where)
    worst_first = sorted(wheres.items(), key=lambda item: item[0][0] is not State.BAD)
    return [f"{topic} ({_where(where, findings)}): {remedy}" for (_, topic, remedy), where in worst_first]


def _where(locations: Sequence[str], findings: Findings) -> str:
    num_nodes = len(findings.keys() - {ALL})
    return ALL if len(locations) == num_nodes > 1 else ", ".join(locations)
