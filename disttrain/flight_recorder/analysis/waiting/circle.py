"""Finds ranks that wait for each other in a circle: over collectives of several groups, or for messages. Pure,
torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from disttrain.flight_recorder.analysis.alignment.match import Match
from disttrain.flight_recorder.analysis.verdict import Kind, Verdict
from disttrain.flight_recorder.analysis.waiting.wait_graph import Wait, circle_of
from disttrain.flight_recorder.analysis.wording import call_text, capitalized, location
from disttrain.flight_recorder.record.by_identity import ByIdentity
from disttrain.flight_recorder.record.record import RECEIVE, SEND, ranks_text

_MAX_LINES: Final = 32
"""Of evidence with one wait each."""


def find_circle(matched: Match, waits: Sequence[Wait]) -> list[Verdict]:
    """Finds ranks that wait for each other in a circle; at most one verdict."""
    circle = circle_of(waits)
    if not circle:
        return []
    evidence = _lines(matched, circle)
    messages = [wait for wait in circle if wait.is_message]
    if not messages:
        return [_of_collectives(circle, evidence)]
    operations = {wait.record.site.operation for wait in messages}
    everybody = {wait.rank for wait in circle}
    if operations == {SEND} and {wait.rank for wait in messages} == everybody:
        summary = f"{capitalized(ranks_text(everybody))} send to each other at the same time, and none receives."
        return [Verdict(Kind.CROSSED_SENDS, tuple(sorted(everybody)), summary, evidence)]
    if operations == {SEND, RECEIVE}:
        summary = f"{capitalized(ranks_text(everybody))} wait for each other's messages in a circle."
        return [Verdict(Kind.WAIT_CYCLE, tuple(sorted(everybody)), summary, evidence)]
    return [_of_one_side(matched, circle, messages, evidence)]


def _lines(matched: Match, circle: Sequence[Wait]) -> tuple[str, ...]:
    """A line for each wait; where these are many, one for all that are alike, as half of the ranks may wait for
    half."""
    lines: dict[tuple[str, str, str, int], list[int]] = {}
    texts = ByIdentity(ranks_text)
    for number, wait in enumerate(circle):
        where = location(matched.dumps[wait.rank], wait.record.site.stack)
        key = texts(wait.for_ranks), call_text(wait.record), where, number if len(circle) <= _MAX_LINES else 0
        lines.setdefault(key, []).append(wait.rank)
    return tuple(
        f"{ranks_text(ranks)} {'wait' if len(ranks) > 1 else 'waits'} for {whom} in {call} at {where}"
        for (whom, call, where, _), ranks in lines.items()
    )


def _of_collectives(circle: Sequence[Wait], evidence: tuple[str, ...]) -> Verdict:
    ranks_by_call: dict[tuple[str, int], list[int]] = {}
    members: dict[str, set[int]] = {}
    for wait in circle:
        site = wait.record.site
        ranks_by_call.setdefault((site.group_name, wait.record.sequence), []).append(wait.rank)
        if site.group_name not in members:
            members[site.group_name] = set(site.ranks)
    everybody = sorted({wait.rank for wait in circle})
    who = capitalized(ranks_text(everybody))
    shared = set.intersection(*members.values())
    if len(shared & set(everybody)) < 2:
        names = ", ".join(sorted(members))
        summary = f"{who} wait for each other in a circle over {len(members)} groups ({names})."
        return Verdict(Kind.WAIT_CYCLE, tuple(everybody), summary, evidence)
    by_size = sorted(ranks_by_call.values(), key=len)
    is_tie = len(by_size) < 2 or len(by_size[-1]) == len(by_size[-2])
    to_blame = sorted(rank for ranks in (by_size if is_tie else by_size[:-1]) for rank in ranks)
    summary = f"{who} wait for each other in a circle: they call collectives of {len(members)} groups in different "
    summary += "order."
    return Verdict(Kind.WRONG_ORDER, tuple(to_blame), summary, evidence)


def _of_one_side(
    matched: Match, circle: Sequence[Wait], messages: Sequence[Wait], evidence: tuple[str, ...]
) -> Verdict:
    in_message = {wait.rank for wait in messages}
    # A rank that is itself held up in a message may still come to its part; one that is past its part in a collective
    # has left it out.
    guilty = [wait for wait in messages if set(wait.for_ranks) - in_message] or list(messages)
    to_blame = sorted({rank for wait in guilty for rank in wait.for_ranks})
    record = guilty[0].record
    verb, end = ("receive", "send") if record.site.operation == SEND else ("send", "receive")
    kind = Kind.MISSING_RECEIVE if record.site.operation == SEND else Kind.MISSING_SEND
    everybody = ranks_text(wait.rank for wait in circle)
    summary = f"{capitalized(ranks_text(to_blame))} did not {verb} what {ranks_text(w.rank for w in guilty)} waited to "
    summary += (
        f"{end} at {location(matched.dumps[guilty[0].rank], record.site.stack)}; {everybody} wait for each other."
    )
    return Verdict(kind, tuple(to_blame), summary, evidence)
