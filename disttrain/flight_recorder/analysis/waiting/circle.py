"""Finds ranks that wait for each other in a circle: over collectives of several groups, or for messages. Pure,
torch-free."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

from disttrain.flight_recorder.analysis.alignment.match import Match
from disttrain.flight_recorder.analysis.verdict import Kind, Verdict
from disttrain.flight_recorder.analysis.waiting.wait_graph import Wait, circle_of
from disttrain.flight_recorder.analysis.wording import call_text, calls_text, capitalized, location
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
        return [_of_collectives(matched, circle, evidence)]
    operations = {wait.record.site.operation for wait in messages}
    everybody, in_message = {wait.rank for wait in circle}, {wait.rank for wait in messages}
    if operations == {SEND} and in_message == everybody:
        summary = f"{capitalized(ranks_text(everybody))} send to each other at the same time, and none receives."
        return [Verdict(Kind.CROSSED_SENDS, tuple(sorted(everybody)), summary, evidence)]
    # A rank that is itself held up in a message may still come to its part; one that is past its part in a collective
    # has left it out.
    guilty = [wait for wait in messages if set(wait.for_ranks) - in_message]
    if operations == {SEND, RECEIVE} and not guilty:
        summary = f"{capitalized(ranks_text(everybody))} wait for each other's messages in a circle."
        return [Verdict(Kind.WAIT_CYCLE, tuple(sorted(everybody)), summary, evidence)]
    return [_of_left_out(matched, circle, guilty or messages, evidence)]


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


def _of_collectives(matched: Match, circle: Sequence[Wait], evidence: tuple[str, ...]) -> Verdict:
    everybody = {wait.rank for wait in circle}
    members: dict[str, set[int]] = {}
    for wait in circle:
        site = wait.record.site
        if site.group_name not in members:
            members[site.group_name] = everybody.intersection(site.ranks)
    widest = max(members, key=lambda name: len(members[name]))
    who = f"{capitalized(ranks_text(everybody))} wait for each other in a circle"
    if any(len(its & members[widest]) < 2 for its in members.values()):
        summary = f"{who} over {len(members)} groups ({', '.join(sorted(members))})."
        return Verdict(Kind.WAIT_CYCLE, tuple(sorted(everybody)), summary, evidence)
    waits_by_call: dict[Hashable, list[Wait]] = {}
    for wait in circle:
        site = wait.record.site
        # Along an axis of a mesh many small groups call the same.
        is_small = len(members[site.group_name]) < len(members[widest])
        key = (site.operation, site.stack) if is_small else (site.group_name, wait.record.sequence)
        waits_by_call.setdefault(key, []).append(wait)
    by_size = sorted(waits_by_call.values(), key=len)
    is_tie = len(by_size) < 2 or len(by_size[-1]) == len(by_size[-2])
    to_blame = sorted({wait.rank for waits in (by_size if is_tie else by_size[:-1]) for wait in waits})
    summary = f"{who}: they call collectives of {len(members)} groups in different order"
    if len(members) > 2:
        summary += f": {'; '.join(_way(matched, waits) for waits in by_size)}"
    return Verdict(Kind.WRONG_ORDER, tuple(to_blame), f"{summary}.", evidence)


def _way(matched: Match, waits: Sequence[Wait]) -> str:
    """Who waits where, in one call or in those of several groups."""
    first = waits[0]
    others = {wait.record.site.group_name for wait in waits} - {first.record.site.group_name}
    where = location(matched.dumps[first.rank], first.record.site.stack)
    return f"{ranks_text(wait.rank for wait in waits)} in {calls_text(first.record, len(others))} at {where}"


def _of_left_out(matched: Match, circle: Sequence[Wait], guilty: Sequence[Wait], evidence: tuple[str, ...]) -> Verdict:
    """Of messages in `guilty` the other ends are left out."""
    in_message = {wait.rank for wait in circle if wait.is_message}
    parts, to_blame = [], set()
    for operation in dict.fromkeys(wait.record.site.operation for wait in guilty):
        waits = [wait for wait in guilty if wait.record.site.operation == operation]
        verb, end = ("receive", "send") if operation == SEND else ("send", "receive")
        blamed = {rank for wait in waits for rank in wait.for_ranks}
        blamed = blamed - in_message or blamed
        to_blame |= blamed
        where = location(matched.dumps[waits[0].rank], waits[0].record.site.stack)
        whose = ranks_text(wait.rank for wait in waits)
        parts.append(f"{ranks_text(blamed)} did not {verb} what {whose} waited to {end} at {where}")
    kind = Kind.MISSING_RECEIVE if guilty[0].record.site.operation == SEND else Kind.MISSING_SEND
    everybody = ranks_text(wait.rank for wait in circle)
    summary = f"{capitalized('; '.join(parts))}; {everybody} wait for each other."
    return Verdict(kind, tuple(sorted(to_blame)), summary, evidence)
