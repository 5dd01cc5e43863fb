"""Puts the dumps of all ranks side by side: which ranks came to a collective, which message has its other end.

Ranks are aligned per (group, sequence number), and messages per (group, sender, receiver, number): never by time, since
clocks differ. Pure and torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from disttrain.flight_recorder.analysis.alignment.collectives import Collectives
from disttrain.flight_recorder.analysis.alignment.messages import Messages
from disttrain.flight_recorder.analysis.alignment.tracks import Tracker
from disttrain.flight_recorder.analysis.wording import outside
from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.record.columns import Records
from disttrain.flight_recorder.record.record import CallSite, GroupProgress, Record, Stack, State


@dataclass(frozen=True)
class Match:
    """All dumps of one job, by rank, and what their records say together.

    `collectives` are by group name and then, in order, by sequence number; `messages` by `message_key`. `records` are
    those of the dumps, in columns; `connecting` those for which a rank waits for the members of a group to connect.
    """

    world_size: int
    dumps: Mapping[int, Dump]
    records: Mapping[int, Records]
    collectives: Mapping[str, Collectives]
    messages: Messages
    connecting: Mapping[int, Sequence[Record]]

    @cached_property
    def without_dump(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.dumps]


@dataclass
class ConnectingSites:
    """The call sites of calls that rings do not have yet, those of one group and line once."""

    _sites: dict[tuple[str, int, str, Stack, str], CallSite] = field(default_factory=dict)

    def record(self, dump: Dump, group: GroupProgress) -> Record:
        """A record for the call for which the group's members have not all connected."""
        stack = outside(dump, dump.main_stack)
        # Not by the ranks themselves, which are as many as there are dumps.
        key = (group.group_name, id(group.ranks), group.connecting, stack, group.axis_name)
        if key not in self._sites:
            called = (group.group_name, group.ranks, group.connecting, (), (), (), None, stack)
            self._sites[key] = CallSite(*called, group.axis_name)
        last = dump.records[-1] if dump.records else None
        last_s = dump.started_s if last is None else last.completed_s or last.enqueued_s
        return Record(self._sites[key], group.last_sequence + 1, State.CONNECTING, last_s)


def match(dumps: Sequence[Dump]) -> Match:
    """Align the dumps of one job, at most one for a rank."""
    by_rank = {dump.rank: dump for dump in sorted(dumps, key=lambda dump: dump.rank)}
    records = {rank: Records.of(dump.records) for rank, dump in by_rank.items()}
    groups: dict[str, Collectives] = {}
    messages = Messages(by_rank)
    tracker, sites = Tracker(), ConnectingSites()
    connecting: dict[int, list[Record]] = {}
    for rank, dump in by_rank.items():
        for progress in dump.groups:
            name = progress.group_name
            if name not in groups:
                groups[name] = Collectives(name, progress.ranks, by_rank)
            groups[name].note_progress(rank, progress.last_sequence)
            if progress.connecting:
                connecting.setdefault(rank, []).append(record := sites.record(dump, progress))
                groups[name].note_connecting(rank, record)
        for key, track in tracker.tracks(records[rank]):
            name, operation, _ = key
            if operation:
                messages.note_track(rank, key, track)
                continue
            if name not in groups:
                groups[name] = Collectives(name, track.records.site_at(track.positions[0]).ranks, by_rank)
            groups[name].note_track(rank, track)
    world_size = max((dump.world_size for dump in by_rank.values()), default=0)
    return Match(world_size, by_rank, records, groups, messages, connecting)
