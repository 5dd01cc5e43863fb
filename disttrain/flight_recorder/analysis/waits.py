"""Finds which rank waits for which: from each operation that has not ended, to the ranks without which it cannot end.

Following these edges from the ranks that wait leads to ranks that wait for nobody, which hold up the others, or round
in a circle. Pure and torch-free.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Final

from disttrain.flight_recorder.analysis.match import Match, connecting_record, message_key
from disttrain.flight_recorder.analysis.on_device import LOOSE, find_device_waits, members_of
from disttrain.flight_recorder.analysis.wording import waited_s
from disttrain.flight_recorder.dumps.dump import RING, Dump
from disttrain.flight_recorder.record.record import SEND, Record, State

MIN_WAIT_S: Final = 1.0
"""The shortest wait of a hang: if no rank had waited this long when it was dumped, there is no hang."""

UNSURE_S: Final = 10.0
"""The same if all have come. They may be connecting, or nobody may wait yet: without stacks, and on GPUs, an unfinished
operation may be one that the host has only begun."""


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


def find_waits(matched: Match, gone: AbstractSet[int] = frozenset()) -> list[Wait]:
    """Finds all operations in which some rank waits, or waited until they failed. Ranks that are `gone` wait no
    more."""
    waits = [
        Wait(rank, record, _missing(matched, rank, record, gone))
        for rank, dump in matched.dumps.items()
        if rank not in gone
        for record in [*_pending(dump), *_connecting(dump)]
        if not _has_arrived(matched, rank, record)
    ]
    if any(record.device for dump in matched.dumps.values() for record in dump.records):
        waits += _on_devices(matched, gone)
    else:
        held_up = {wait.rank for wait in waits} | gone
        waits += [Wait(*wait) for wait in find_device_waits(matched) if wait[0] not in held_up]
    reached = [wait for wait in waits if not wait.record.is_queued]
    return reached or waits if any(map(partial(_is_long, matched), waits)) else []


def _is_long(matched: Match, wait: Wait) -> bool:
    dump, record = matched.dumps[wait.rank], wait.record
    if record.state is State.FAILED or (record.state is State.ON_DEVICE and record.device is None):
        return True
    is_sure = bool(wait.for_ranks) or record.state is State.ON_DEVICE
    is_sure |= record.state is State.ENQUEUED and bool(dump.threads)
    return waited_s(dump, record) >= (MIN_WAIT_S if is_sure else UNSURE_S)


def _pending(dump: Dump) -> list[Record]:
    """Records that this rank hangs in. A failure that it got over does not count, nor what it has not begun to wait
    for."""
    failed: list[Record] = []
    for record in reversed(dump.records):
        if record.state is State.COMPLETED:
            break
        if record.state is State.FAILED:
            failed.append(record)
    if failed or dump.is_in_transport or not dump.threads:
        return failed + [record for record in dump.records if record.state is State.ENQUEUED]
    return []


def _on_devices(matched: Match, gone: AbstractSet[int]) -> Iterator[Wait]:
    """Operations that hosts have left, and devices have come to and not left as far as is known: of each group the
    last."""
    come = {rank: _last_come(dump) for rank, dump in matched.dumps.items() if rank not in gone}
    furthest: dict[str, int] = {}
    for last, _ in come.values():
        for record in last:
            if not record.site.is_message:
                name = record.site.group_name
                furthest[name] = max(furthest.get(name, 0), record.sequence)
    for rank, (last, newest) in come.items():
        for record in last:
            if record.state is State.COMPLETED and record.times_s[1] is None:
                on_device = record._replace(state=State.ON_DEVICE)
                missing = _missing(matched, rank, on_device, gone)
                if record is newest and matched.dumps[rank].device_is_busy:
                    missing = tuple(sorted({*missing, *_of_lost_devices(matched, rank, on_device, gone)}))
                wait = Wait(rank, on_device, missing)
                was_left = not wait.is_message and record.sequence < furthest[record.site.group_name]
                if _is_sure(matched, wait, was_left=was_left):
                    yield wait


def _last_come(dump: Dump) -> tuple[list[Record], Record | None]:
    """Records that its device has come to last, of each group and each channel, in their order; and of all."""
    last: dict[Hashable, Record] = {}
    newest = None
    for record in dump.records:
        if record.device is not None and record.device.came_s is not None:
            site, newest = record.site, record
            key = site.group_name, *((site.operation, site.peer_rank) if site.is_message else ())
            last.pop(key, None)
            last[key] = record
    return list(last.values()), newest


def _of_lost_devices(matched: Match, rank: int, record: Record, gone: AbstractSet[int]) -> set[int]:
    """Ranks that take part and are gone with all that was known of their device, which may never have come to it."""
    return {other for other in members_of(matched, rank, record) & gone if matched.dumps[other].reason == RING}


def _is_sure(matched: Match, wait: Wait, *, was_left: bool) -> bool:
    """True if a device cannot have left it, though that is not marked: others have not come to it.

    Where these may leave it first, or nothing is known of them, or all have come, the devices must be known to be busy.
    `was_left`: another's device has come to a later one of the group, and so has left this one, which nobody does
    before all have come: the rank's own device is held up behind it.
    """
    is_loose = wait.record.site.operation in LOOSE
    busy = {rank for rank, dump in matched.dumps.items() if dump.device_is_busy}
    if not wait.for_ranks:
        return members_of(matched, wait.rank, wait.record) <= busy and (is_loose or not was_left)
    return wait.rank in busy or (not is_loose and not set(matched.without_dump).issuperset(wait.for_ranks))


def _connecting(dump: Dump) -> list[Record]:
    return [connecting_record(dump, group) for group in dump.groups if group.connecting]


def _has_arrived(matched: Match, rank: int, record: Record) -> bool:
    """True for a send that the other end has received, whatever its sender knows of that."""
    if record.site.operation != SEND or record.state is State.CONNECTING:
        return False
    receive = matched.messages[message_key(rank, record)].receive
    return receive is not None and receive.state is State.COMPLETED and not receive.is_queued


def _missing(matched: Match, rank: int, record: Record, gone: AbstractSet[int]) -> tuple[int, ...]:
    if record.is_queued:
        return ()  # It waits for the work that is queued before it.
    if record.state is State.CONNECTING or not record.site.is_message:
        collective = matched.collectives[record.site.group_name][record.sequence]
        missing = collective.absent + collective.unknown
        held_up = {other for other in gone & collective.records.keys() if _is_under_way(collective.records[other])}
        held_up |= {other for other, its in collective.records.items() if its.is_queued and other != rank}
        return missing + tuple(sorted(held_up.difference(missing)))
    message = matched.messages[message_key(rank, record)]
    peer_rank = message.dst_rank if rank == message.src_rank else message.src_rank
    is_alone = message.send is None or message.receive is None
    other = message.receive if rank == message.src_rank else message.send
    if other is not None and (other.is_queued or (peer_rank in gone and _is_under_way(other))):
        return (peer_rank,)
    return (peer_rank,) if is_alone and (message.is_absent or peer_rank not in matched.dumps) else ()


def _is_under_way(record: Record) -> bool:
    return record.state in (State.ENQUEUED, State.CONNECTING)


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
