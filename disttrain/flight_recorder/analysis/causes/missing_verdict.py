"""The verdict on ranks that have not come: what they did not come to, who waits there, and what became of them.

Each of many ranks may have a reason of its own, as a message with its number; what those that wait for it share
is put together once for all these verdicts. Pure and torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from disttrain.flight_recorder.analysis.alignment.collectives import Collective
from disttrain.flight_recorder.analysis.alignment.match import Match
from disttrain.flight_recorder.analysis.causes.mismatch import divergence
from disttrain.flight_recorder.analysis.verdict import Cause, Kind, Verdict
from disttrain.flight_recorder.analysis.waiting.wait_graph import Front, Wait
from disttrain.flight_recorder.analysis.waiting.waits import MIN_WAIT_S
from disttrain.flight_recorder.analysis.wording import (
    arrival_lines,
    call_text,
    calls_text,
    capitalized,
    location,
    stack_line,
    waited_s,
)
from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.record.record import Record, ranks_text

_MAX_LISTED: Final = 64
"""Of ranks that wait for ranks that wait."""


@dataclass(frozen=True)
class _Direct:
    """Those who wait for some ranks: the longest wait, and the sentences about them."""

    longest: Wait
    who: str
    where: str
    arrivals: list[str]
    indirect: list[str]
    collective: Collective | None
    divergence: list[str]


@dataclass
class MissingVerdicts:
    """Makes verdicts on absent ranks from `waits`, and the same in `fronts`."""

    matched: Match
    waits: Sequence[Wait]
    fronts: Sequence[Front]
    _known: dict[tuple[int, ...], _Direct] = field(default_factory=dict)

    def verdict(self, kind: Kind, cause: Cause, why: str, ranks: list[int], indexes: Sequence[int]) -> Verdict:
        """The verdict on `ranks`, for which the fronts with these `indexes` wait."""
        dumps = self.matched.dumps
        direct = self._direct(tuple(indexes))
        record = direct.longest.record
        evidence = list(direct.arrivals)
        for rank in ranks[:4]:
            if (dump := dumps.get(rank)) is not None:
                evidence += _traces(dump, record)
        came = [rank for rank in ranks if direct.collective is not None and rank in direct.collective.records]
        evidence += direct.divergence + direct.indirect
        did = "came to" if came else "did not come to"
        # Of a node's ranks each may be missing in a group of its own.
        groups = {self.fronts[index].waits[0].record.site.group_name for index in indexes}
        call = calls_text(record, 0 if set(ranks) <= set(record.site.ranks) else len(groups) - 1)
        call += " but did not leave it" if came else ""
        summary = f"{capitalized(ranks_text(ranks))} {did} {call}, where {direct.who} waited at {direct.where}: {why}."
        return Verdict(kind, tuple(ranks), summary, tuple(evidence), cause)

    def waits_in(self, indexes: Iterable[int]) -> list[Wait]:
        """The waits in the fronts with these indexes, in their order among all waits."""
        waits = (wait for index in indexes for wait in self.fronts[index].waits)
        return sorted(waits, key=lambda wait: self._places[id(wait)])

    @cached_property
    def _places(self) -> dict[int, int]:
        return {id(wait): index for index, wait in enumerate(self.waits)}

    def _direct(self, indexes: tuple[int, ...]) -> _Direct:
        if indexes not in self._known:
            self._known[indexes] = self._put_together(indexes)
        return self._known[indexes]

    def _put_together(self, indexes: tuple[int, ...]) -> _Direct:
        matched = self.matched
        waits = self.waits_in(indexes)
        longest = max(waits, key=lambda wait: waited_s(matched.dumps[wait.rank], wait.record))
        record = longest.record
        collective = None
        if not longest.is_message:
            collective = matched.collectives[record.site.group_name][record.sequence]
        direct = {wait.rank for wait in waits}
        return _Direct(
            longest,
            ranks_text(direct),
            location(matched.dumps[longest.rank], record.site.stack),
            arrival_lines(matched.dumps, {wait.rank: wait.record for wait in waits}),
            self._indirect(direct),
            collective,
            [] if collective is None else divergence(matched, collective),
        )

    def _indirect(self, direct: set[int]) -> list[str]:
        num_others = len(self._waiting) - len(direct)
        if not num_others:
            return []
        # Each of very many verdicts would list all ranks.
        who = ranks_text(self._waiting - direct) if num_others <= _MAX_LISTED else f"{num_others} other ranks"
        return [f"{who} wait for ranks that wait"]

    @cached_property
    def _waiting(self) -> set[int]:
        return {wait.rank for wait in self.waits}


def _traces(dump: Dump, record: Record) -> list[str]:
    """Evidence that an absent rank has left: where it is, its last call, and how old that news is."""
    lines = [stack_line(dump)] if dump.threads or dump.failure else []
    if dump.records:
        last = dump.records[-1]
        lines.append(f"rank {dump.rank}: last was {call_text(last)} at {location(dump, last.site.stack)}, {last.state}")
    age_s = record.enqueued_s - dump.dumped_s
    if dump.failure is None and age_s >= MIN_WAIT_S:
        lines.append(f"rank {dump.rank}: its dump is {age_s:.1f} s older than this call, or the clocks differ")
    return lines
