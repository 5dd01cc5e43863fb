"""Who waits for whom: from each operation that has not ended, to the ranks without which it cannot end.

Following these edges from the ranks that wait leads to ranks that wait for nobody, which hold up the others, or round
in a circle. Pure and torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from disttrain.flight_recorder.dump import Dump
from disttrain.flight_recorder.match import Match, message_key
from disttrain.flight_recorder.record import Record, State
from disttrain.flight_recorder.wording import waited_s

MIN_WAIT_S: Final = 1.0
"""Where no rank has waited for as long as this when it was dumped, there is no hang."""


@dataclass(frozen=True)
class Wait:
    """Rank `rank` waits in `record` for the ranks `for_ranks`: for nobody, when all have come and it does not end."""

    rank: int
    record: Record
    for_ranks: tuple[int, ...]


def find_waits(found: Match) -> list[Wait]:
    """All operations in which some rank waits, or waited until they failed."""
    waits = [
        Wait(rank, record, _missing(found, rank, record))
        for rank, dump in found.dumps.items()
        for record in _pending(dump)
    ]
    is_hang = any(
        wait.record.state is State.FAILED or waited_s(found.dumps[wait.rank], wait.record) >= MIN_WAIT_S
        for wait in waits
    )
    return waits if is_hang else []


def _pending(dump: Dump) -> list[Record]:
    """What this rank hangs in. A failure that it got over does not count, nor what it has not begun to wait for."""
    failed: list[Record] = []
    for record in reversed(dump.records):
        if record.state is State.COMPLETED:
            break
        if record.state is State.FAILED:
            failed.append(record)
    if failed or dump.is_in_transport or not dump.threads:
        return failed + [record for record in dump.records if record.state is State.ENQUEUED]
    return []


def _missing(found: Match, rank: int, record: Record) -> tuple[int, ...]:
    if not record.site.is_message:
        meeting = found.meetings[record.site.group_name][record.sequence]
        return meeting.absent + meeting.unknown
    message = found.messages[message_key(rank, record)]
    peer_rank = message.dst_rank if rank == message.src_rank else message.src_rank
    is_alone = message.send is None or message.receive is None
    return (peer_rank,) if is_alone and (message.is_absent or peer_rank not in found.dumps) else ()


def ends_of(waits: Sequence[Wait]) -> set[int]:
    """The ranks that others wait for and that wait for nobody themselves."""
    waiting = {wait.rank for wait in waits}
    return {rank for wait in waits for rank in wait.for_ranks} - waiting


def circle_of(waits: Sequence[Wait]) -> list[Wait]:
    """The waits of ranks that wait for each other all around, and for nobody outside."""
    edges: dict[int, set[int]] = {}
    for wait in waits:
        edges.setdefault(wait.rank, set()).update(wait.for_ranks)
    waiting_for_nobody = {rank for rank, others in edges.items() if not others}
    outside = {rank for others in edges.values() for rank in others} - set(edges)
    inside = set(edges) - _reaching(edges, waiting_for_nobody | outside)
    while waited_for := inside & {other for rank in inside for other in edges[rank]}:
        if waited_for == inside:
            break
        inside = waited_for
    return [wait for wait in waits if wait.rank in inside]


def _reaching(edges: Mapping[int, set[int]], targets: set[int]) -> set[int]:
    """`targets` and all ranks from which one of them can be reached."""
    backwards: dict[int, list[int]] = {}
    for rank, others in edges.items():
        for other in others:
            backwards.setdefault(other, []).append(rank)
    reached, frontier = set(targets), list(targets)
    while frontier:
        for rank in backwards.get(frontier.pop(), ()):
            if rank not in reached:
                reached.add(rank)
                frontier.append(rank)
    return reached
