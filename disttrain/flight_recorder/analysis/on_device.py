"""Finds waits on GPUs in dumps without marks, in which hosts have left each collective as soon as it was queued.

A device runs its queue in order, and leaves no collective before the devices of all members have come to it. So the
last calls of all ranks are simulated together: where the simulation gets stuck, devices are stuck. Pure, torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from disttrain.flight_recorder.analysis.match import Collective, Match, message_key
from disttrain.flight_recorder.dumps.dump import RING
from disttrain.flight_recorder.dumps.words import END_REASONS
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
    for rank in play.queues:
        if (front := play.front(rank)) is not None:
            others = play.missing(front)
            if rank in busy or (ended.intersection(others) and matched.dumps[rank].reason != RING):
                waits.append((rank, _held(front), others))
    if waits:
        return waits  # Other busy ranks have other work on their devices.
    return [
        (rank, _held(queue[-1]), ())
        for rank, queue in play.queues.items()
        if rank in busy and queue and members_of(matched, rank, queue[-1]) <= busy
    ]


def _last_collectives(matched: Match) -> Iterable[Collective]:
    return (collectives[max(collectives)] for collectives in matched.collectives.values() if collectives)


def members_of(matched: Match, rank: int, record: Record) -> set[int]:
    """The ranks with a dump among those that `record` is of."""
    peers = (rank, record.site.peer_rank) if record.site.is_message else record.site.ranks
    return matched.dumps.keys() & set(peers)


def _held(record: Record) -> Record:
    return record._replace(state=State.ON_DEVICE, completed_s=None)


class _Play:
    """Devices that go through their ranks' `queues` until none gets any further."""

    def __init__(self, matched: Match) -> None:
        self._matched = matched
        self.queues = {
            rank: [record for record in dump.records[-_NUM_LAST:] if record.state in (State.COMPLETED, State.ENQUEUED)]
            for rank, dump in matched.dumps.items()
        }
        self._places = dict.fromkeys(self.queues, 0)
        self._queued = {
            (rank, record.site.group_name, record.sequence)
            for rank, queue in self.queues.items()
            for record in queue
            if not record.site.is_message
        }
        self._came: dict[tuple[str, int], set[int]] = {}
        moving = list(self.queues)
        while moving:
            moving += self._advance(moving.pop())

    def front(self, rank: int) -> Record | None:
        """The record at which its device hangs, if it does, and its host does not."""
        queue, index = self.queues[rank], self._places[rank]
        return queue[index] if index < len(queue) and queue[index].state is State.COMPLETED else None

    def missing(self, record: Record) -> tuple[int, ...]:
        """The ranks whose devices have not come to it."""
        if record.site.is_message:
            return () if record.site.peer_rank is None else (record.site.peer_rank,)
        arrived = self._came[record.site.group_name, record.sequence]
        collective = self._collective_of(record)
        behind = (rank for rank in self._needed(collective) if rank not in arrived)
        return tuple(sorted({*collective.absent, *collective.unknown, *behind}))

    def _advance(self, rank: int) -> Sequence[int]:
        """Let this device go as far as it can. Returns: those that can go on because it has come."""
        queue = self.queues[rank]
        while self._places[rank] < len(queue):
            record = queue[self._places[rank]]
            if record.site.operation == RECEIVE:
                if self._matched.messages[message_key(rank, record)].is_absent:
                    return ()
            elif record.site.operation not in LOOSE:
                collective = self._collective_of(record)
                arrived = self._came.setdefault((collective.group_name, collective.sequence), set())
                arrived.add(rank)
                needed = self._needed(collective)
                if collective.absent or collective.unknown or not arrived.issuperset(needed):
                    return ()
                for other in needed:
                    self._places[other] += 1
                return needed
            self._places[rank] += 1
        return ()

    def _collective_of(self, record: Record) -> Collective:
        return self._matched.collectives[record.site.group_name][record.sequence]

    def _needed(self, collective: Collective) -> list[int]:
        """Members whose records of it are in their queues; those of others are long past."""
        return [
            rank for rank in collective.records if (rank, collective.group_name, collective.sequence) in self._queued
        ]
