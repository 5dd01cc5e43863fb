"""Judges aligned dumps: lists verdicts, the most probable cause first. Pure and torch-free.

Certain causes come before probable ones: calls that contradict each other, ranks that wait in a circle, ranks that
others wait for, and only then what may be missing from the dumps.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Final

from disttrain.flight_recorder.analysis.alignment.match import Match
from disttrain.flight_recorder.analysis.causes.membership import find_different_groups
from disttrain.flight_recorder.analysis.causes.mismatch import find_mismatches, other_shapes
from disttrain.flight_recorder.analysis.causes.missing_ranks import broke, cause_of_missing, is_victim, lifeless, raised
from disttrain.flight_recorder.analysis.causes.missing_verdict import MissingVerdicts
from disttrain.flight_recorder.analysis.causes.straggler import find_straggler
from disttrain.flight_recorder.analysis.causes.together import find_all_entered, never_started, records_in
from disttrain.flight_recorder.analysis.verdict import Cause, Kind, Verdict
from disttrain.flight_recorder.analysis.waiting.circle import find_circle
from disttrain.flight_recorder.analysis.waiting.wait_graph import Wait, ends_of, fronts_of
from disttrain.flight_recorder.analysis.waiting.waits import find_waits
from disttrain.flight_recorder.analysis.wording import arrival_lines, capitalized, location, stack_line
from disttrain.flight_recorder.dumps.words import EXIT
from disttrain.flight_recorder.record.record import SEND, Record, ranks_text

_CONNECTING_S: Final = 5.0
"""A rank that connects to the others of a group for longer waits for one that does not come."""


def judge(matched: Match) -> list[Verdict]:
    """Lists verdicts, at least one; `nothing_wrong` and `not_enough_data` stand alone."""
    if not matched.dumps:
        return [Verdict(Kind.NOT_ENOUGH_DATA, (), "There is no dump that can be used.")]
    waits = find_waits(matched, {*lifeless(matched), *raised(matched)})
    for find in (_contradictions, _unconnected, find_all_entered, _raised, _incomplete):
        if verdicts := find(matched, waits):
            return verdicts
    summary = f"All {matched.world_size} ranks agree, and none waits for another."
    return find_straggler(matched) or [Verdict(Kind.NOTHING_WRONG, (), summary, tuple(other_shapes(matched)))]


def _contradictions(matched: Match, waits: Sequence[Wait]) -> list[Verdict]:
    certain = find_mismatches(matched) + find_different_groups(matched, waits) + find_circle(matched, waits)
    blamed = {rank for verdict in certain if verdict.kind is Kind.DIFFERENT_GROUPS for rank in verdict.ranks}
    return certain + [verdict for verdict in _ends(matched, waits) if not set(verdict.ranks) <= blamed]


def _ends(matched: Match, waits: Sequence[Wait]) -> list[Verdict]:
    """The ranks that others wait for and that wait for nobody themselves; similar ones share a verdict."""
    fronts = fronts_of(waits)
    ends = sorted(ends_of(fronts))
    # Of each of these, the indexes of the fronts that wait for it.
    direct: dict[int, list[int]] = {rank: [] for rank in ends}
    for index, front in enumerate(fronts):
        for rank in direct.keys() & set(front.for_ranks):
            direct[rank].append(index)
    alike: dict[tuple[Kind, Cause, Hashable], dict[int, str]] = {}
    queued: dict[tuple[str, str, int], dict[int, Record]] = {}
    was_broken = broke(waits)
    all_records = [records_in(matched, front.waits[0]) for front in fronts]
    for rank in ends:
        of_waits = [all_records[index].get(rank) for index in direct[rank]]
        not_begun = [record for record in of_waits if record is not None and record.is_queued]
        if not_begun:
            first = min(not_begun, key=lambda record: record.enqueued_s)
            queued.setdefault((first.site.group_name, first.site.operation, first.sequence), {})[rank] = first
            continue
        cause, why = cause_of_missing(matched, rank, was_broken=was_broken)
        first_waits = [fronts[index].waits[0] for index in direct[rank]]
        forgot = cause is Cause.ENDED and all(wait.is_message for wait in first_waits)
        kind = _missing_end(first_waits[0].record) if forgot else Kind.RANK_ABSENT
        alike.setdefault((kind, cause, _raised_alike(matched, rank, why)), {})[rank] = why
    missing = MissingVerdicts(matched, waits, fronts)
    verdicts = []
    for (kind, cause, _), whys in alike.items():
        its_fronts = sorted({index for rank in whys for index in direct[rank]})
        verdicts.append(missing.verdict(kind, cause, _why_of_all(whys), list(whys), its_fronts))
    for records in queued.values():
        indexes = {index for rank in records for index in direct[rank]}
        others = {wait.rank: wait.record for wait in missing.waits_in(indexes)}
        verdicts.append(never_started(matched, records, arrival_lines(matched.dumps, others | records)))
    return sorted(verdicts, key=lambda verdict: _doubt(matched, verdict, was_broken=was_broken))


def _raised_alike(matched: Match, rank: int, why: str) -> Hashable:
    """Where and what a rank raised, but for the words: these may say which rank it is, or which batch it had. Of others
    `why` they are missing."""
    failure = matched.dumps[rank].failure if rank in matched.dumps else None
    return why if failure is None else (failure.kind, failure.stack, is_victim(failure))


def _why_of_all(whys: Mapping[int, str]) -> str:
    (first, why), *others = whys.items()
    if all(other == why for _, other in others):
        return why
    return f"rank {first} {why.removeprefix('it ')}, and the others there with words of their own"


def _doubt(matched: Match, verdict: Verdict, *, was_broken: bool) -> int:
    """Lower is more probable.

    A rank that was seen elsewhere is certain; a dump may also be missing because nobody collected it. But broken
    connections mean that the process at their other end is gone. A rank that gave up waiting itself is not a cause.
    """
    dump = matched.dumps.get(verdict.ranks[0])
    if dump is None:
        return 0 if was_broken else 3
    if dump.failure is not None and is_victim(dump.failure):
        return 4
    return 1 if verdict.cause in (Cause.RAISED, Cause.DEAD) else 2


def _unconnected(matched: Match, waits: Sequence[Wait]) -> list[Verdict]:
    """Ranks inside the first collective of a group, which is on record only once all members are connected."""
    waiting = {wait.rank for wait in waits}
    inside = {rank: None for rank, dump in matched.dumps.items() if rank not in waiting and dump.is_in_transport}
    connecting = [rank for rank in inside if _idle_s(matched, rank) >= _CONNECTING_S]
    others = [rank for rank in range(matched.world_size) if rank not in inside and rank not in waiting]
    if not connecting or not others:
        return []
    evidence = [
        f"rank {rank} is inside a collective that is not on record yet, at {location(dump, dump.main_stack)}"
        for rank in connecting
        for dump in [matched.dumps[rank]]
    ]
    became = [cause_of_missing(matched, rank, was_broken=False) for rank in others]
    whys = {why if rank in matched.dumps else "it has no dump" for rank, (_, why) in zip(others, became, strict=True)}
    evidence += [stack_line(matched.dumps[rank]) for rank in others[:4] if rank in matched.dumps]
    summary = f"{capitalized(ranks_text(others))} did not come to the first collective of a group, for which "
    summary += f"{ranks_text(connecting)} waited: {'; '.join(sorted(whys))}."
    return [Verdict(Kind.RANK_ABSENT, tuple(others), summary, tuple(evidence), became[0][0])]


def _raised(matched: Match, _waits: Sequence[Wait]) -> list[Verdict]:
    """Ranks that ended with an exception that nobody waits for, or only in ways that are not on record. One that raised
    since another had gone is told of behind that other."""
    failed = [rank for rank, dump in matched.dumps.items() if dump.failure is not None]
    if not failed:
        return []
    left = [rank for rank, dump in matched.dumps.items() if dump.failure is None and dump.reason == EXIT]
    ranks = tuple(raised(matched) or left or failed)
    cause, why = cause_of_missing(matched, ranks[0], was_broken=False)
    if len(ranks) > 1:
        why = (
            f"rank {ranks[0]} {why.removeprefix('it ')}" if ranks[0] in failed else "their scripts have come to an end"
        )
    if ranks[0] not in failed:
        why += f"; rank {failed[0]} {cause_of_missing(matched, failed[0], was_broken=False)[1].removeprefix('it ')}"
    summary = f"{capitalized(ranks_text(ranks))} ended early: {why}."
    evidence = tuple(stack_line(matched.dumps[rank]) for rank in (ranks if ranks[0] in failed else failed)[:4])
    return [Verdict(Kind.RANK_ABSENT, ranks, summary, evidence, cause)]


def _incomplete(matched: Match, _waits: Sequence[Wait]) -> list[Verdict]:
    absent = matched.without_dump
    if not absent:
        return []
    summary = f"{capitalized(ranks_text(absent))} of {matched.world_size} have no dump; the others wait for nobody."
    return [Verdict(Kind.NOT_ENOUGH_DATA, (), summary)]


def _missing_end(record: Record) -> Kind:
    return Kind.MISSING_RECEIVE if record.site.operation == SEND else Kind.MISSING_SEND


def _idle_s(matched: Match, rank: int) -> float:
    dump = matched.dumps[rank]
    return dump.dumped_s - max([dump.started_s, *(record.enqueued_s for record in dump.records[-1:])])
