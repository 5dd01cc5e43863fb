"""From aligned dumps to verdicts, the most probable cause first. Pure and torch-free.

What is certain comes before what is likely: calls that contradict each other, ranks that wait in a circle, ranks that
others wait for, and only then what may be missing from the dumps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from disttrain.flight_recorder.match import Match
from disttrain.flight_recorder.mismatch import divergence, find_mismatches
from disttrain.flight_recorder.record import SEND, Record, State, ranks_text
from disttrain.flight_recorder.straggler import find_straggler
from disttrain.flight_recorder.verdict import Kind, Verdict
from disttrain.flight_recorder.waits import MIN_WAIT_S, Wait, circle_of, ends_of, find_waits
from disttrain.flight_recorder.wording import (
    call_text,
    came_lines,
    doing,
    place,
    stack_line,
    waited_s,
)

_CONNECTING_S: Final = 5.0
"""A rank that connects to the others of a group for longer waits for one that does not come."""


def judge(found: Match) -> list[Verdict]:
    """At least one verdict; `nothing_wrong` and `not_enough_data` stand alone."""
    if not found.dumps:
        return [Verdict(Kind.NOT_ENOUGH_DATA, (), "There is no dump that can be used.")]
    waits = find_waits(found)
    for find in (_contradictions, _unconnected, _gone_together, _incomplete):
        if verdicts := find(found, waits):
            return verdicts
    return find_straggler(found) or [
        Verdict(Kind.NOTHING_WRONG, (), f"All {found.world_size} ranks agree, and none waits for another.")
    ]


def _contradictions(found: Match, waits: Sequence[Wait]) -> list[Verdict]:
    return find_mismatches(found) + _circle(found, circle_of(waits)) + _ends(found, waits)


def _ends(found: Match, waits: Sequence[Wait]) -> list[Verdict]:
    """The ranks that others wait for and that wait for nobody, those that are alike in one verdict."""
    alike: dict[tuple[Kind, str], list[int]] = {}
    for rank in sorted(ends_of(waits)):
        dump = found.dumps.get(rank)
        if dump is None:
            alike.setdefault((Kind.RANK_ABSENT, _no_dump(waits)), []).append(rank)
            continue
        direct = [wait.record for wait in waits if rank in wait.for_ranks]
        forgot = dump.reason == "exit" and all(record.site.is_message for record in direct)
        alike.setdefault((_missing_end(direct[0]) if forgot else Kind.RANK_ABSENT, doing(dump)), []).append(rank)
    verdicts = [_absent(found, waits, kind, ranks, why) for (kind, why), ranks in alike.items()]
    # A rank that was seen elsewhere is certain; a dump may also be missing because nobody collected it. But where
    # connections broke, the process at their other end has gone.
    broken = any(_is_broken(wait.record) for wait in waits)
    return sorted(verdicts, key=lambda verdict: (verdict.ranks[0] in found.dumps) == broken)


def _absent(found: Match, waits: Sequence[Wait], kind: Kind, ranks: list[int], why: str) -> Verdict:
    direct = [wait for wait in waits if set(ranks) & set(wait.for_ranks)]
    longest = max(direct, key=lambda wait: waited_s(found.dumps[wait.rank], wait.record))
    record = longest.record
    who, others = ranks_text(ranks), ranks_text(wait.rank for wait in direct)
    evidence = came_lines(found.dumps, {wait.rank: wait.record for wait in direct})
    for rank in ranks[:4]:
        if (dump := found.dumps.get(rank)) is None:
            continue
        evidence.append(stack_line(dump))
        if dump.records:
            last = dump.records[-1]
            evidence.append(f"rank {rank}: last was {call_text(last)} at {place(dump, last.site.stack)}, {last.state}")
        age_s = record.enqueued_s - dump.dumped_s
        if dump.failure is None and age_s >= MIN_WAIT_S:
            evidence.append(f"rank {rank}: its dump is {age_s:.1f} s older than this call, or the clocks differ")
    if not record.site.is_message:
        evidence += divergence(found, found.meetings[record.site.group_name][record.sequence])
    indirect = {wait.rank for wait in waits} - {wait.rank for wait in direct}
    if indirect:
        evidence.append(f"{ranks_text(indirect)} wait for ranks that wait")
    summary = f"{_capitalized(who)} did not come to {call_text(record)}, where {others} waited at "
    summary += f"{place(found.dumps[longest.rank], record.site.stack)}: {why}."
    return Verdict(kind, tuple(ranks), summary, tuple(evidence))


def _circle(found: Match, circle: Sequence[Wait]) -> list[Verdict]:
    """Ranks that wait for each other: over collectives of several groups, or for messages that nobody sends."""
    if not circle:
        return []
    messages = [wait for wait in circle if wait.record.site.is_message]
    evidence = [
        f"rank {wait.rank} waits for {ranks_text(wait.for_ranks)} in {call_text(wait.record)} at "
        f"{place(found.dumps[wait.rank], wait.record.site.stack)}"
        for wait in circle
    ]
    everybody = ranks_text(wait.rank for wait in circle)
    if not messages:
        places: dict[tuple[str, int], list[int]] = {}
        for wait in circle:
            places.setdefault((wait.record.site.group_name, wait.record.sequence), []).append(wait.rank)
        by_size = sorted(places.values(), key=len)
        is_tie = len(by_size) < 2 or len(by_size[-1]) == len(by_size[-2])
        to_blame = sorted(rank for ranks in (by_size if is_tie else by_size[:-1]) for rank in ranks)
        summary = f"{_capitalized(everybody)} wait for each other in a circle: they call collectives of "
        summary += f"{len({name for name, _ in places})} groups in different order."
        return [Verdict(Kind.WRONG_ORDER, tuple(to_blame), summary, tuple(evidence))]
    in_message = {wait.rank for wait in messages}
    # Who is itself held up in a message may get to its own part yet; who is past that in a collective has left it out.
    guilty = [wait for wait in messages if set(wait.for_ranks) - in_message] or messages
    to_blame = sorted({rank for wait in guilty for rank in wait.for_ranks})
    record = guilty[0].record
    verb, end = ("receive", "send") if record.site.operation == SEND else ("send", "receive")
    summary = (
        f"{_capitalized(ranks_text(to_blame))} did not {verb} what {ranks_text(w.rank for w in guilty)} waited to "
    )
    summary += f"{end} at {place(found.dumps[guilty[0].rank], record.site.stack)}; {everybody} wait for each other."
    return [Verdict(_missing_end(record), tuple(to_blame), summary, tuple(evidence))]


def _unconnected(found: Match, waits: Sequence[Wait]) -> list[Verdict]:
    """Ranks inside the first collective of a group, which is on record only once all members are connected."""
    waiting = {wait.rank for wait in waits}
    inside = [rank for rank, dump in found.dumps.items() if rank not in waiting and dump.is_in_transport]
    connecting = [rank for rank in inside if _idle_s(found, rank) >= _CONNECTING_S]
    others = [rank for rank in range(found.world_size) if rank not in inside and rank not in waiting]
    if not connecting or not others:
        return []
    evidence = [
        f"rank {rank} is inside a collective that is not on record yet, at {place(dump, dump.main_stack)}"
        for rank in connecting
        for dump in [found.dumps[rank]]
    ]
    whys = {doing(found.dumps[rank]) if rank in found.dumps else "it has no dump" for rank in others}
    evidence += [stack_line(found.dumps[rank]) for rank in others[:4] if rank in found.dumps]
    summary = f"{_capitalized(ranks_text(others))} did not come to the first collective of a group, for which "
    summary += f"{ranks_text(connecting)} waited: {'; '.join(sorted(whys))}."
    return [Verdict(Kind.RANK_ABSENT, tuple(others), summary, tuple(evidence))]


def _gone_together(found: Match, waits: Sequence[Wait]) -> list[Verdict]:
    """Operations that all have entered alike and that do not end: too late for some, or for reasons no dump shows."""
    if not waits:
        return []
    record = waits[0].record
    met = {
        wait.rank: wait.record
        for wait in waits
        if (wait.record.site.group_name, wait.record.sequence) == (record.site.group_name, record.sequence)
    }
    times_s = {rank: waited_s(found.dumps[rank], own) for rank, own in met.items()}
    longest_s = max(times_s.values())
    late = [rank for rank, time_s in times_s.items() if time_s < longest_s / 2]
    if late and longest_s >= MIN_WAIT_S and any(own.state is State.FAILED for own in met.values()):
        summary = f"{_capitalized(ranks_text(late))} came to {call_text(record)} when others had waited for "
        summary += f"{longest_s - max(times_s[rank] for rank in late):.1f} s and gave up."
        return [Verdict(Kind.STRAGGLER, tuple(sorted(late)), summary, tuple(came_lines(found.dumps, met)))]
    summary = f"All ranks that {call_text(record)} needs have entered it alike, and it does not end: the network, "
    summary += "the transport or a device holds it up, which dumps don't show."
    return [Verdict(Kind.NOT_ENOUGH_DATA, (), summary, tuple(came_lines(found.dumps, met)))]


def _incomplete(found: Match, waits: Sequence[Wait]) -> list[Verdict]:
    absent = found.without_dump
    if not absent:
        return []
    summary = f"{_capitalized(ranks_text(absent))} of {found.world_size} have no dump; the others wait for nobody."
    return [Verdict(Kind.NOT_ENOUGH_DATA, (), summary)]


def _no_dump(waits: Iterable[Wait]) -> str:
    if any(_is_broken(wait.record) for wait in waits):
        return "there is no dump, and connections broke, so that the process has gone"
    return "there is no dump, so that the process has died, is stopped, or its dump was not collected"


def _is_broken(record: Record) -> bool:
    """True for a failure that says that the process at the other end has gone, in Gloo's words or the system's."""
    error = (record.error or "").lower()
    return any(
        words in error for words in ("connection closed", "connection reset", "broken pipe", "connection refused")
    )


def _missing_end(record: Record) -> Kind:
    return Kind.MISSING_RECEIVE if record.site.operation == SEND else Kind.MISSING_SEND


def _idle_s(found: Match, rank: int) -> float:
    dump = found.dumps[rank]
    return dump.dumped_s - max([dump.started_s, *(record.enqueued_s for record in dump.records[-1:])])


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
