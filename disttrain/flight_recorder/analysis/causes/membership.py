"""Ranks that made different groups: other members under one name, or a group that a member never made. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from disttrain.flight_recorder.analysis.alignment.match import Match
from disttrain.flight_recorder.analysis.verdict import Kind, Verdict
from disttrain.flight_recorder.analysis.waiting.wait_graph import Wait, fronts_of
from disttrain.flight_recorder.analysis.wording import capitalized, location, stack_line
from disttrain.flight_recorder.dumps.dump import RING
from disttrain.flight_recorder.dumps.words import EXIT
from disttrain.flight_recorder.record.record import State, ranks_text

_MAX_PAIRS: Final = 64
"""Of ranks, one of which waits for the other, in the evidence."""


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
    fronts = fronts_of(waits)
    # Of each wait for a group to connect, the ranks that have not made it: one list for all waits in a front.
    missed: dict[int, list[int]] = {}
    accused: set[int] = set()
    of_outsiders: set[int] = set()
    for front in fronts:
        connecting = [wait for wait in front.waits if wait.record.state is State.CONNECTING]
        if connecting:
            ranks = _without_group(matched, connecting[0], waiting)
            missed |= dict.fromkeys(map(id, connecting), ranks)
            accused.update(ranks)
    for front in fronts:
        for wait in front.waits:
            if wait.rank not in accused and missed.get(id(wait)):
                of_outsiders.update(missed[id(wait)])
                break
    # Ranks that are missed only by ranks that are missed themselves may have made the right groups.
    to_blame = of_outsiders or accused
    if not to_blame:
        return []
    names = sorted({front.waits[0].record.site.group_title for front in fronts if to_blame & set(front.for_ranks)})
    summary = f"{capitalized(ranks_text(to_blame))} did not make group {', '.join(names)}, in which others wait for "
    summary += "it: ranks make different groups."
    pairs = ((wait, rank) for wait in waits for rank in missed.get(id(wait), ()))
    # Of many, some are enough to see it by.
    lines = (line for wait, rank in islice(pairs, _MAX_PAIRS) for line in _lines(matched, waiting, wait, rank))
    return [Verdict(Kind.DIFFERENT_GROUPS, tuple(sorted(to_blame)), summary, tuple(dict.fromkeys(lines)))]


def _without_group(matched: Match, wait: Wait, waiting: Mapping[int, Wait]) -> list[int]:
    """The ranks that `wait` is for and that will not make its group."""
    name = wait.record.site.group_name
    ranks = []
    for rank in wait.for_ranks:
        dump = matched.dumps.get(rank)
        if dump is None or dump.reason == RING or any(group.group_name == name for group in dump.groups):
            continue
        if rank in waiting or dump.reason == EXIT:
            ranks.append(rank)
    return ranks


def _lines(matched: Match, waiting: Mapping[int, Wait], wait: Wait, rank: int) -> Iterator[str]:
    """Evidence that `rank` has not made the group that `wait` is in, and where it is instead."""
    dump, site = matched.dumps[rank], wait.record.site
    members = set(site.ranks)
    alike = [group.group_name for group in dump.groups if set(group.ranks) == members]
    others = f"; of the same ranks it has made {', '.join(alike)}" if alike else ""
    yield (
        f"rank {wait.rank} waits for rank {rank} in group {site.group_title} at "
        f"{location(matched.dumps[wait.rank], site.stack)}; rank {rank} has not made that group{others}"
    )
    made = waiting[rank].record.site if rank in waiting else None
    if made is not None:
        yield f"rank {rank} waits in {made.operation} of group {made.group_title} at {location(dump, made.stack)}"
    else:
        yield stack_line(dump)
