"""Finds records of one rank by their numbers, within one group or one channel of messages.

Nothing is kept for each record: the numbers of a track nearly always rise by one, so the first of them tells where each
is. Pure and torch-free.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from disttrain.flight_recorder.record.columns import COMPLETED, Ints, Records
from disttrain.flight_recorder.record.record import CallSite, Record

TrackKey = tuple[str, str, int]
"""Group name, and of messages the operation and the peer's rank, or -1."""
NO_PEER = -1
TrackContent = tuple[tuple[int, ...], int, int, int]
"""The addresses of its call sites, of the numbers of all call sites, and of the positions; the first number."""


class Track(NamedTuple):
    """The records at `positions`, oldest first, numbered from `first` on; `by_number` where they are not in order.

    `content` is equal for ranks whose dumps were read together and that made the same calls in this track.
    """

    records: Records
    positions: Ints
    first: int
    by_number: dict[int, int] | None
    content: TrackContent

    def position(self, number: int) -> int | None:
        """The place of the last record with this number."""
        if self.by_number is not None:
            return self.by_number.get(number)
        index = number - self.first
        return self.positions[index] if 0 <= index < len(self.positions) else None

    def find(self, number: int) -> Record | None:
        """The last record with this number."""
        position = self.position(number)
        return None if position is None else self.records[position]

    def numbers(self) -> Sequence[int]:
        """All numbers, each once."""
        return range(self.first, self.first + len(self.positions)) if self.by_number is None else list(self.by_number)

    def unfinished(self) -> list[int]:
        """The numbers whose last record has not ended."""
        states = self.records.states
        pairs = enumerate(self.positions, self.first) if self.by_number is None else self.by_number.items()
        return [number for number, position in pairs if states[position] != COMPLETED]

    def sites(self) -> list[CallSite]:
        """The call site of each of the numbers."""
        positions = self.positions if self.by_number is None else self.by_number.values()
        site_numbers = self.records.site_numbers
        return [self.records.sites[site_numbers[position]] for position in positions]

    def sites_before(self, number: int) -> set[int]:
        """The indexes of all call sites of lower numbers."""
        if self.by_number is None:
            positions: Sequence[int] = self.positions[: max(0, number - self.first)]
        else:
            positions = [position for other, position in self.by_number.items() if other < number]
        return {self.records.site_numbers[position] for position in positions}


def key_of(site: CallSite) -> TrackKey:
    """The track that calls of this site are in."""
    if not site.is_message:
        return site.group_name, "", NO_PEER
    return site.group_name, site.operation, NO_PEER if site.peer_rank is None else site.peer_rank


@dataclass
class Tracker:
    """Divides the records of ranks into tracks. Ranks whose calls came in the same order share the positions."""

    _positions: dict[tuple[int, tuple[int, ...]], list[Ints]] = field(default_factory=dict)
    _numbers: dict[tuple[int, int], tuple[int, dict[int, int] | None]] = field(default_factory=dict)

    def tracks(self, records: Records) -> Iterator[tuple[TrackKey, Track]]:
        """The tracks of one rank's records, in the order of their first records."""
        keys: dict[TrackKey, int] = {}
        of_sites = tuple(keys.setdefault(key_of(site), len(keys)) for site in records.sites)
        # The columns are kept by their records, so that their addresses stay their own.
        cache_key = (id(records.site_numbers), of_sites)
        if cache_key not in self._positions:
            self._positions[cache_key] = _divided(records.site_numbers, of_sites, len(keys))
        addresses: list[list[int]] = [[] for _ in keys]
        for site, track in zip(records.sites, of_sites, strict=True):
            addresses[track].append(id(site))
        tracks = [
            (key, self._track(records, positions, tuple(sites)))
            for key, positions, sites in zip(keys, self._positions[cache_key], addresses, strict=True)
            if positions
        ]
        return iter(sorted(tracks, key=lambda each: each[1].positions[0]))

    def _track(self, records: Records, positions: Ints, addresses: tuple[int, ...]) -> Track:
        cache_key = (id(records.sequences), id(positions))
        if cache_key not in self._numbers:
            self._numbers[cache_key] = _numbered(records.sequences, positions)
        first, by_number = self._numbers[cache_key]
        return Track(records, positions, first, by_number, (addresses, id(records.site_numbers), id(positions), first))


def _divided(site_numbers: Ints, of_sites: Sequence[int], num_tracks: int) -> list[Ints]:
    if num_tracks == 1:
        return [range(len(site_numbers))]
    positions = [array("I") for _ in range(num_tracks)]
    appends: list[Callable[[int], None]] = [positions[track].append for track in of_sites]
    for position, site_number in enumerate(site_numbers):
        appends[site_number](position)
    return list(positions)


def _numbered(sequences: Ints, positions: Ints) -> tuple[int, dict[int, int] | None]:
    """The first number of a track; and the position of each number where they do not rise by one."""
    is_all = len(positions) == len(sequences)
    numbers = list(sequences) if is_all else [sequences[position] for position in positions]
    first = numbers[0]
    is_run = numbers == list(range(first, first + len(numbers)))
    return first, None if is_run else dict(zip(numbers, positions, strict=True))
