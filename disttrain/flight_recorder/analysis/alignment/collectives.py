"""The collectives of one group, as the ranks' records together tell them.

One is put together when it is asked for, since few of thousands are, and each has as many records as the group has
ranks. Pure and torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from disttrain.flight_recorder.analysis.alignment.tracks import Track, TrackContent
from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.record.record import CallSite, Record, Stack


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


class Collectives(Mapping[int, Collective]):
    """The collectives of one group by sequence number, in order."""

    def __init__(self, name: str, ranks: tuple[int, ...], dumps: Mapping[int, Dump]) -> None:
        self.name = name
        self.ranks = ranks
        self._dumps = dumps
        self._tracks: dict[int, Track] = {}
        self._connecting: dict[int, dict[int, Record]] = {}
        self._last: dict[int, int] = {}
        self._made: dict[int, Collective] = {}
        self._have_all_come: dict[int, bool] = {}

    def note_progress(self, rank: int, last_sequence: int) -> None:
        self._last[rank] = max(self._last.get(rank, 0), last_sequence)

    def note_connecting(self, rank: int, record: Record) -> None:
        self._connecting.setdefault(record.sequence, {})[rank] = record

    def note_track(self, rank: int, track: Track) -> None:
        self._tracks[rank] = track

    @cached_property
    def _numbers(self) -> list[int]:
        return sorted({*self._connecting, *(number for track in self._kinds for number in track.numbers())})

    @cached_property
    def _kinds(self) -> list[Track]:
        """The tracks, of those with the same content one."""
        return list({track.content: track for track in reversed(self._tracks.values())}.values())[::-1]

    def __getitem__(self, sequence: int) -> Collective:
        if sequence not in self._made:
            collective = self._put_together(sequence)
            if not collective.records:
                raise KeyError(sequence)
            self._made[sequence] = collective
        return self._made[sequence]

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._connecting or any(track.position(sequence) is not None for track in self._kinds)  # type: ignore[arg-type]

    @property
    def last(self) -> Collective | None:
        """The one with the highest number."""
        return self[self._numbers[-1]] if self._numbers else None

    def have_all_come(self, sequence: int) -> bool:
        """True where no rank is absent from it, and none unknown."""
        if sequence <= self._all_have_come_to:
            return True
        if sequence not in self._have_all_come:
            collective = self._put_together(sequence)
            self._have_all_come[sequence] = not collective.absent and not collective.unknown
        return self._have_all_come[sequence]

    @cached_property
    def _all_have_come_to(self) -> int:
        """The last to which all ranks have come by their counts; 0 where one has no dump."""
        return min((self._last.get(rank, 0) if rank in self._dumps else 0 for rank in self.ranks), default=0)

    def _put_together(self, sequence: int) -> Collective:
        connecting = self._connecting.get(sequence, {})
        records: dict[int, Record] = {}
        for rank in self._tracks if not connecting else sorted(self._tracks.keys() | connecting):
            record = self._tracks[rank].find(sequence) if rank in self._tracks else None
            if record is None:
                record = connecting.get(rank)
            if record is not None:
                records[rank] = record
        if len(records) == len(self.ranks):
            return Collective(self.name, sequence, self.ranks, records, (), ())
        dumps, last = self._dumps, self._last
        return Collective(
            self.name,
            sequence,
            self.ranks,
            records,
            absent=tuple(
                rank for rank in self.ranks if rank in dumps and rank not in records and last.get(rank, 0) < sequence
            ),
            unknown=tuple(rank for rank in self.ranks if rank not in dumps),
        )

    @cached_property
    def mixed(self) -> dict[int, dict[int, tuple[CallSite, int]]]:
        """Of each sequence number that ranks called differently, or from different lines, its call sites by address,
        each with the first rank that called from it. Ranks whose dumps were read together share call sites."""
        first: dict[int, int] = {}
        sites: dict[int, tuple[CallSite, int]] = {}
        mixed: dict[int, dict[int, tuple[CallSite, int]]] = {}
        for rank, numbers, called in self._called():
            addresses = list(map(id, called))
            for site, address in zip(called, addresses, strict=True):
                sites.setdefault(address, (site, rank))
            expected = list(map(first.get, numbers, addresses))
            if expected != addresses:
                for number, first_address, address in zip(numbers, expected, addresses, strict=True):
                    if first_address != address:
                        mixed.setdefault(number, {first_address: sites[first_address]})[address] = sites[address]
            for number, address in zip(numbers, addresses, strict=True):
                first.setdefault(number, address)
        return dict(sorted(mixed.items()))

    def stacks_before(self, sequence: int) -> set[Stack]:
        """The lines of all calls with lower numbers."""
        stacks = {
            record.site.stack
            for number, records in self._connecting.items()
            if number < sequence
            for record in records.values()
        }
        for track in self._kinds:
            stacks |= {track.records.sites[index].stack for index in track.sites_before(sequence)}
        return stacks

    def _called(self) -> Iterator[tuple[int, Sequence[int], Sequence[CallSite]]]:
        """A rank, numbers and their call sites; of ranks that called the same, one."""
        seen: set[TrackContent] = set()
        for rank, track in self._tracks.items():
            if track.content not in seen:
                seen.add(track.content)
                yield rank, track.numbers(), track.sites()
        for number, records in self._connecting.items():
            for rank, record in records.items():
                if rank not in self._tracks or self._tracks[rank].position(number) is None:
                    yield rank, [number], [record.site]
