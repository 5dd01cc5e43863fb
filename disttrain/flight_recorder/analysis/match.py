"""Puts the dumps of all ranks side by side: which ranks came to a collective, which message has its other end.

Ranks are aligned per (group, sequence number), and messages per (group, sender, receiver, number): never by time, since
clocks differ. Pure and torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from disttrain.flight_recorder.analysis.wording import outside
from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.record.record import RECEIVE, SEND, CallSite, GroupProgress, Record, State


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of one group: the records of the ranks that came, if their rings still have them.

    `absent` ranks have a dump and have not come; `unknown` ones have no dump.
    """

    group_name: str
    sequence: int
    ranks: tuple[int, ...]
    records: Mapping[int, Record]
    absent: tuple[int, ...]
    unknown: tuple[int, ...]

    @property
    def title(self) -> str:
        return f"#{self.sequence} of group {self.group_name}"


@dataclass(frozen=True, slots=True)
class Message:
    """One message: the record of either end, None where its rank has not issued it or its ring has lost it.

    `is_absent` says that an end is missing for sure: its rank's dump counts fewer messages on this channel.
    """

    group_name: str
    number: int
    src_rank: int
    dst_rank: int
    send: Record | None
    receive: Record | None
    is_absent: bool


MessageKey = tuple[str, int, int, int]
"""Group name, sender, receiver, number."""


@dataclass(frozen=True)
class Match:
    """All dumps of one job, by rank, and what their records say together.

    `collectives` are by group name and then, in order, by sequence number; `messages` by `message_key`.
    """

    world_size: int
    dumps: Mapping[int, Dump]
    collectives: Mapping[str, Mapping[int, Collective]]
    messages: Mapping[MessageKey, Message]

    @property
    def without_dump(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.dumps]


@dataclass
class _Group:
    """The records of one group, as far as dumps have been read."""

    ranks: tuple[int, ...] = ()
    last: dict[int, int] = field(default_factory=dict)
    collectives: dict[int, dict[int, Record]] = field(default_factory=dict)


def message_key(rank: int, record: Record) -> MessageKey:
    """The message that `record`, a send or receive of `rank`, is an end of."""
    site = record.site
    peer_rank = -1 if site.peer_rank is None else site.peer_rank
    ends = (rank, peer_rank) if site.operation == SEND else (peer_rank, rank)
    return (site.group_name, *ends, record.sequence)


def connecting_record(dump: Dump, group: GroupProgress) -> Record:
    """A record for a call that the ring does not have yet, since the group's members have not all connected for it."""
    called = (group.group_name, group.ranks, group.connecting, (), (), (), None, outside(dump, dump.main_stack))
    last_s = max((record.completed_s or record.enqueued_s for record in dump.records[-1:]), default=dump.started_s)
    return Record(CallSite(*called, group.axis_name), group.last_sequence + 1, State.CONNECTING, last_s)


def match(dumps: Sequence[Dump]) -> Match:
    """Align the dumps of one job, at most one for a rank."""
    by_rank = {dump.rank: dump for dump in sorted(dumps, key=lambda dump: dump.rank)}
    groups: dict[str, _Group] = {}
    messages: dict[MessageKey, dict[str, Record]] = {}
    for rank, dump in by_rank.items():
        for progress in dump.groups:
            _note_progress(groups, rank, progress)
            if progress.connecting:
                record = connecting_record(dump, progress)
                groups[progress.group_name].collectives.setdefault(record.sequence, {})[rank] = record
        _note_records(groups, messages, rank, dump)
    return Match(
        world_size=max((dump.world_size for dump in by_rank.values()), default=0),
        dumps=by_rank,
        collectives={
            name: {sequence: _collective_of(name, sequence, group, by_rank) for sequence in sorted(group.collectives)}
            for name, group in groups.items()
        },
        messages={key: _message(key, ends, by_rank) for key, ends in messages.items()},
    )


def _note_records(
    groups: dict[str, _Group], messages: dict[MessageKey, dict[str, Record]], rank: int, dump: Dump
) -> None:
    """The loop over all records of all ranks. Call sites are compared by address, so the fields of each are read
    once."""
    collectives_of: dict[int, dict[int, dict[int, Record]] | None] = {}
    for record in dump.records:
        site_id = id(record[0])
        if site_id not in collectives_of:
            site = record.site
            if not site.is_message and site.group_name not in groups:
                groups[site.group_name] = _Group(site.ranks)
            collectives_of[site_id] = None if site.is_message else groups[site.group_name].collectives
        collectives = collectives_of[site_id]
        if collectives is None:
            messages.setdefault(message_key(rank, record), {})[record.site.operation] = record
        elif record[1] in collectives:
            collectives[record[1]][rank] = record
        else:
            collectives[record[1]] = {rank: record}


def _note_progress(groups: dict[str, _Group], rank: int, progress: GroupProgress) -> None:
    group = groups.get(progress.group_name)
    if group is None:
        group = groups[progress.group_name] = _Group(progress.ranks)
    group.last[rank] = max(group.last.get(rank, 0), progress.last_sequence)


def _collective_of(name: str, sequence: int, group: _Group, dumps: Mapping[int, Dump]) -> Collective:
    records = group.collectives[sequence]
    if len(records) == len(group.ranks):
        return Collective(name, sequence, group.ranks, records, (), ())
    return Collective(
        group_name=name,
        sequence=sequence,
        ranks=group.ranks,
        records=records,
        absent=tuple(
            rank for rank in group.ranks if rank in dumps and rank not in records and group.last.get(rank, 0) < sequence
        ),
        unknown=tuple(rank for rank in group.ranks if rank not in dumps),
    )


def _message(key: MessageKey, ends: Mapping[str, Record], dumps: Mapping[int, Dump]) -> Message:
    group_name, src_rank, dst_rank, number = key
    send, receive = ends.get(SEND), ends.get(RECEIVE)
    is_absent = False
    if send is None:
        is_absent = src_rank in dumps and _num_messages(dumps[src_rank], group_name, SEND, dst_rank) < number
    elif receive is None:
        is_absent = dst_rank in dumps and _num_messages(dumps[dst_rank], group_name, RECEIVE, src_rank) < number
    return Message(group_name, number, src_rank, dst_rank, send, receive, is_absent)


def _num_messages(dump: Dump, group_name: str, operation: str, peer_rank: int) -> int:
    for channel in dump.channels:
        if (channel.group_name, channel.operation, channel.peer_rank) == (group_name, operation, peer_rank):
            return channel.last_sequence
    return 0
