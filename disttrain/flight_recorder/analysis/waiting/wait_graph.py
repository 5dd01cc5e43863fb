"""The graph of which rank waits for which, by operations: half of the ranks may wait for the other half, so the edges
between ranks are not listed. All is linear in the waits and the members of the operations. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from disttrain.flight_recorder.record.record import Record, State


@dataclass(frozen=True)
class Wait:
    """Rank `rank` waits in `record` for the ranks `for_ranks`: for nobody, when all have come and it does not end."""

    rank: int
    record: Record
    for_ranks: tuple[int, ...]

    @property
    def is_message(self) -> bool:
        """True for a send or receive that has got as far as its transport."""
        return self.record.site.is_message and self.record.state is not State.CONNECTING


@dataclass(frozen=True)
class Front:
    """All waits in one operation for the same ranks."""

    waits: list[Wait]
    for_ranks: tuple[int, ...]

    @property
    def ranks(self) -> list[int]:
        return [wait.rank for wait in self.waits]


def fronts_of(waits: Sequence[Wait]) -> list[Front]:
    """The waits put together, in the order of the first of each. There may be half as many for half of the ranks each,
    but of fronts there are no more than operations."""
    fronts: dict[Hashable, Front] = {}
    for wait in waits:
        record = wait.record
        end = (wait.rank, record.site.operation, record.site.peer_rank) if wait.is_message else ()
        # Those who wait in one operation have one tuple: its ranks need not be compared.
        key = (id(wait.for_ranks), record.site.group_name, record.sequence, end)
        fronts.setdefault(key, Front([], wait.for_ranks)).waits.append(wait)
    return list(fronts.values())


def ends_of(fronts: Iterable[Front]) -> set[int]:
    """The ranks that others wait for and that wait for nobody themselves."""
    waiting: set[int] = set()
    waited_for: set[int] = set()
    for front in fronts:
        waiting.update(front.ranks)
        waited_for.update(front.for_ranks)
    return waited_for - waiting


def circle_of(waits: Sequence[Wait]) -> list[Wait]:
    """The waits of ranks that wait for each other all around, and for nobody outside."""
    fronts = fronts_of(waits)
    waiting = {wait.rank for wait in waits}
    for_somebody = {rank for front in fronts if front.for_ranks for rank in front.ranks}
    inside = waiting - _reaching(fronts, (waiting - for_somebody) | ends_of(fronts))
    left = _waited_for(fronts, inside)
    return [wait for wait in waits if wait.rank in left]


def _reaching(fronts: Sequence[Front], targets: set[int]) -> set[int]:
    """`targets` and all ranks from which one of them can be reached."""
    fronts_for = _by_rank(fronts, [front.for_ranks for front in fronts])
    reached, frontier = set(targets), list(targets)
    passed: set[int] = set()
    while frontier:
        for index in fronts_for.get(frontier.pop(), ()):
            if index not in passed:
                passed.add(index)
                new = [rank for rank in fronts[index].ranks if rank not in reached]
                reached.update(new)
                frontier += new
    return reached


def _waited_for(fronts: Sequence[Front], inside: set[int]) -> set[int]:
    """Those of `inside` that are left when all are taken out, one after the other, for whom none that is left waits."""
    left = set(inside)
    fronts_of_rank = _by_rank(fronts, [front.ranks for front in fronts])
    num_ranks = [len(left.intersection(front.ranks)) for front in fronts]
    num_fronts = dict.fromkeys(left, 0)
    for front, num_waiting in zip(fronts, num_ranks, strict=True):
        for rank in left.intersection(front.for_ranks) if num_waiting else ():
            num_fronts[rank] += 1
    unwanted = [rank for rank, count in num_fronts.items() if not count]
    while unwanted:
        rank = unwanted.pop()
        left.remove(rank)
        for index in fronts_of_rank[rank]:
            num_ranks[index] -= 1
            if not num_ranks[index]:
                for other in left.intersection(fronts[index].for_ranks):
                    num_fronts[other] -= 1
                    if not num_fronts[other]:
                        unwanted.append(other)
    return left


def _by_rank(fronts: Sequence[Front], ranks: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """The indexes of the fronts that have each rank among their `ranks`, each once."""
    indexes: dict[int, list[int]] = {}
    for index in range(len(fronts)):
        for rank in dict.fromkeys(ranks[index]):
            indexes.setdefault(rank, []).append(index)
    return indexes
