"""Ranks that made different groups: other members under one name, or a group that a member never made. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.flight_recorder.analysis.match import Match
from disttrain.flight_recorder.analysis.verdict import Kind, Verdict
from disttrain.flight_recorder.analysis.wait_graph import Wait
from disttrain.flight_recorder.analysis.wording import capitalized, location, stack_line
from disttrain.flight_recorder.dumps.dump import RING
from disttrain.flight_recorder.dumps.words import EXIT
from disttrain.flight_recorder.record.record import State, ranks_text


def find_different_groups(matched: Match, waits: Sequence[Wait]) -> list[Verdict]:
    """A verdict for each group that ranks know differently and that somebody waits in."""
    return _other_members(matched) or _never_made(matched, waits)


def _other_members(matched: Match) -> list[Verdict]:
    members_by_name: dict[str, dict[int, tuple[tuple[int, ...], list[int]]]] = {}
    for rank, dump in matched.dumps.items():
        for group in dump.groups:
            ways_by_address = members_by_name.setdefault(group.group_name, {})
            ways_by_address.setdefault(id(group.ranks), (group.ranks, []))[1].append(rank)
    verdicts = []
    for name, ways_by_address in members_by_name.items():
        ways: dict[tuple[int, ...], list[int]] = {}
        for members, ranks in ways_by_address.values():
            ways.setdefault(members, []).extend(ranks)
        if len(ways) > 1:
            by_size = sorted(ways.values(), key=len)
            is_tie = len(by_size[-1]) == len(by_size[-2])
            to_blame = sorted(rank for ranks in (by_size if is_tie else by_size[:-1]) for rank in ranks)
            texts = "; ".join(f"{ranks_text(ranks)}: {ranks_text(members)}" for members, ranks in ways.items())
            summary = f"Ranks know different members of group {name}: {texts}."
            verdicts.append(Verdict(Kind.DIFFERENT_GROUPS, tuple(to_blame), summary))
    return verdicts


def _never_made(matched: Match, waits: Sequence[Wait]) -> list[Verdict]:
    """Only a rank that waits, or has ended, will not make the group any more; a ring does not list unused groups."""
    waiting = {wait.rank: wait for wait in waits}
    accusers: dict[int, set[int]] = {}
    evidence: list[str] = []
    for wait in waits:
        if wait.record.state is not State.CONNECTING:
            continue
        name = wait.record.site.group_name
        for rank in wait.for_ranks:
            dump = matched.dumps.get(rank)
            if dump is None or dump.reason == RING or any(group.group_name == name for group in dump.groups):
                continue
            if rank not in waiting and dump.reason != EXIT:
                continue
            accusers.setdefault(rank, set()).add(wait.rank)
            alike = [group.group_name for group in dump.groups if set(group.ranks) == set(wait.record.site.ranks)]
            others = f"; of the same ranks it has made {', '.join(alike)}" if alike else ""
            evidence.append(
                f"rank {wait.rank} waits for rank {rank} in group {wait.record.site.group_title} at "
                f"{location(matched.dumps[wait.rank], wait.record.site.stack)}; rank {rank} has not made that group"
                f"{others}"
            )
            made = waiting[rank].record.site if rank in waiting else None
            if made is not None:
                where = location(dump, made.stack)
                evidence.append(f"rank {rank} waits in {made.operation} of group {made.group_title} at {where}")
            else:
                evidence.append(stack_line(dump))
    # Ranks that are missed only by ranks that are missed themselves may have made the right groups.
    to_blame = {rank for rank, ranks in accusers.items() if not ranks <= accusers.keys()} or set(accusers)
    if not to_blame:
        return []
    names = sorted({wait.record.site.group_title for wait in waits if to_blame & set(wait.for_ranks)})
    to_blame |= {wait.rank for wait in waits if wait.rank in to_blame}
    summary = f"{capitalized(ranks_text(to_blame))} did not make group {', '.join(names)}, in which others wait for "
    summary += "it: ranks make different groups."
    return [Verdict(Kind.DIFFERENT_GROUPS, tuple(sorted(to_blame)), summary, tuple(dict.fromkeys(evidence)))]
