"""Finds waits on GPUs in dumps without marks, in which hosts have left each collective as soon as it was queued.

A device runs its queue in order, and leaves no collective before the devices of all members have come to it. So the
last calls of all ranks are simulated together: where the simulation gets stuck, devices are stuck. Pure, torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from disttrain.flight_recorder.analysis.alignment.collectives import Collective
from disttrain.flight_recorder.analysis.alignment.match import Match
from disttrain.flight_recorder.analysis.alignment.messages import message_key
from disttrain.flight_recorder.dumps.dump import RING
from disttrain.flight_recorder.dumps.words import END_REASONS
from disttrain.flight_recorder.record.by_identity import ByIdentity
from disttrain.flight_recorder.record.columns import COMPLETED, Records
from disttrain.flight_recorder.record.record import RECEIVE, SEND, Record, State

LOOSE: Final = {SEND, "broadcast", "reduce", "gather", "scatter"}
"""Operations that some rank may leave before all have come."""

_NUM_LAST: Final = 256
"""Of each rank's records: devices are not further behind their hosts than some hundred kernels."""

DeviceWait = tuple[int, Record, tuple[int, ...]]
"""A rank, the operation that its device hangs in, and the ranks it waits for: none if all have come and it does not
end."""


def find_device_waits(matched: Match) -> list[DeviceWait]:
    """Finds waits of ranks whose device is busy while the host stands still, and of those whose host went on without
    one that has ended."""
    busy = {rank for rank, dump in matched.dumps.items() if dump.device_is_busy}
    ended = {rank for rank, dump in matched.dumps.items() if dump.reason in END_REASONS}
    if not busy and not any(ended.intersection(collective.absent) for collective in _last_collectives(matched)):
        return []
    play = _Play(matched)
    waits: list[DeviceWait] = []
    has_ended: ByIdentity[tuple[int, ...], bool] = ByIdentity(lambda ranks: not ended.isdisjoint(ranks))
    for rank in play.queues:
        if (front := play.front(rank)) is not None:
            others = play.missing(front)
            if rank in busy or (has_ended(others) and matched.dumps[rank].reason != RING):
                waits.append((rank, _held(front), others))
    if waits:
        return waits  # Other busy ranks have other work on their devices.
    are_busy: ByIdentity[tuple[int, ...], bool] = ByIdentity(lambda ranks: (matched.dumps.keys() & set(ranks)) <= busy)
    return [
        (rank, _held(last), ())
        for rank, last in play.last_queued()
        if rank in busy
        and (members_of(matched, rank, last) <= busy if last.site.is_message else are_busy(last.site.ranks))
    ]


def _last_collectives(matched: Match) -> Iterable[Collective]:
    return filter(None, (collectives.last for collectives in matched.collectives.values()))


def members_of(matched: Match, rank: int, record: Record) -> set[int]:
    """The ranks with a dump among those that `record` is of."""
    peers = (rank, record.site.peer_rank) if record.site.is_message else record.site.ranks
    return matched.dumps.keys() & set(peers)


def _held(record: Record) -> Record:
    return record._replace(state=State.ON_DEVICE, completed_s=None)


class _Play:
    """Devices that go through their ranks' `queues`, positions among the records, until none gets any further."""

    def __init__(self, matched: Match) -> None:
        self._matched = matched
        self.queues = {rank: _queue(records) for rank, records in matched.records.items()}
        self._places = dict.fromkeys(self.queues, 0)
        # Of each collective, the members whose records of it are in their queues; those of others are long past.
        self._needed: dict[tuple[str, int], list[int]] = {}
        for rank, queue in self.queues.items():
            records = matched.records[rank]
            for position in queue:
                if not (site := records.site_at(position)).is_message:
                    needed = self._needed.setdefault((site.group_name, records.sequences[position]), [])
                    if needed[-1:] != [rank]:
                        needed.append(rank)
        self._came: dict[tuple[str, int], set[int]] = {}
        self._missing: dict[tuple[str, int], tuple[int, ...]] = {}
        moving = list(self.queues)
        while moving:
            moving += self._advance(moving.pop())

    def front(self, rank: int) -> Record | None:
        """The record at which its device hangs, if it does, and its host does not."""
        queue, index, records = self.queues[rank], self._places[rank], self._matched.records[rank]
        if index < len(queue) and records.states[queue[index]] == COMPLETED:
            return records[queue[index]]
        return None

    def last_queued(self) -> Iterator[tuple[int, Record]]:
        """The last record of each queue, with its rank."""
        return ((rank, self._matched.records[rank][queue[-1]]) for rank, queue in self.queues.items() if queue)

    def missing(self, record: Record) -> tuple[int, ...]:
        """The ranks whose devices have not come to it."""
        if record.site.is_message:
            return () if record.site.peer_rank is None else (record.site.peer_rank,)
        key = record.site.group_name, record.sequence
        if key not in self._missing:
            arrived = self._came[key]
            collective = self._matched.collectives[key[0]][key[1]]
            behind = (rank for rank in self._needed[key] if rank not in arrived)
            self._missing[key] = tuple(sorted({*collective.absent, *collective.unknown, *behind}))
        return self._missing[key]

    def _advance(self, rank: int) -> Sequence[int]:
        """Let this device go as far as it can. Returns: those that can go on because it has come."""
        queue, records = self.queues[rank], self._matched.records[rank]
        while self._places[rank] < len(queue):
            position = queue[self._places[rank]]
            site = records.site_at(position)
            if site.operation == RECEIVE:
                if self._matched.messages[message_key(rank, records[position])].is_absent:
                    return ()
            elif site.operation not in LOOSE:
                key = site.group_name, records.sequences[position]
                needed = self._needed[key]
                arrived = self._came.setdefault(key, set())
                arrived.add(rank)
                # Those that came are among the needed, so it is enough to count them.
                if len(arrived) < len(needed) or not self._matched.collectives[key[0]].have_all_come(key[1]):
                    return ()
                for other in needed:
                    self._places[other] += 1
                return needed
            self._places[rank] += 1
        return ()


def _queue(records: Records) -> list[int]:
    """The positions of a rank's last records that went to its device."""
    last = range(max(0, len(records) - _NUM_LAST), len(records))
    return [position for position in last if records.state_at(position) in (State.COMPLETED, State.ENQUEUED)]
