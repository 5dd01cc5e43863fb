"""Finds waits on GPUs in dumps with marks: operations that hosts have left, and devices have not. Pure, torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from disttrain.flight_recorder.analysis.alignment.match import Match
from disttrain.flight_recorder.analysis.alignment.tracks import TrackKey, key_of
from disttrain.flight_recorder.analysis.waiting.on_device import LOOSE, members_of
from disttrain.flight_recorder.analysis.waiting.wait_graph import Wait
from disttrain.flight_recorder.analysis.waiting.waited_for import Missing
from disttrain.flight_recorder.dumps.dump import RING
from disttrain.flight_recorder.record.by_identity import ByIdentity
from disttrain.flight_recorder.record.columns import Records
from disttrain.flight_recorder.record.record import Record, State


def find_marked_waits(matched: Match, missing: Missing) -> Iterator[Wait]:
    """Operations that hosts have left, and devices have come to and not left as far as is known: of each group the
    last."""
    come = {rank: _last_come(records) for rank, records in matched.records.items() if rank not in missing.gone}
    furthest: dict[str, int] = {}
    for rank, (last, _) in come.items():
        records = matched.records[rank]
        for position in last:
            site = records.site_at(position)
            if not site.is_message:
                furthest[site.group_name] = max(furthest.get(site.group_name, 0), records.sequences[position])
    devices = _Devices(matched, missing)
    for rank, (last, newest) in come.items():
        for position in last:
            record = matched.records[rank][position]
            if record.state is State.COMPLETED and record.times_s[1] is None:
                on_device = record._replace(state=State.ON_DEVICE)
                for_ranks = missing.of(rank, on_device)
                if position == newest and matched.dumps[rank].device_is_busy:
                    for_ranks = devices.with_lost(rank, on_device, for_ranks)
                wait = Wait(rank, on_device, for_ranks)
                was_left = not wait.is_message and record.sequence < furthest[record.site.group_name]
                if devices.are_sure(wait, was_left=was_left):
                    yield wait


def _last_come(records: Records) -> tuple[Sequence[int], int | None]:
    """The positions of what its device has come to last, of each group and each channel, in order; and of all."""
    if records.devices is None:
        return (), None
    keys = list(map(key_of, records.sites))
    last: dict[TrackKey, int] = {}
    newest = None
    for position, (number, came_s) in enumerate(zip(records.site_numbers, records.devices.came_s, strict=True)):
        if came_s == came_s:
            last[keys[number]] = newest = position
    return sorted(last.values()), newest


class _Devices:
    """The ranks' devices: which are known to be busy, and which are lost with all that was known of them."""

    def __init__(self, matched: Match, missing: Missing) -> None:
        dumps = matched.dumps
        self._matched = matched
        self._busy = {rank for rank, dump in dumps.items() if dump.device_is_busy}
        self._lost = {rank for rank in missing.gone if rank in dumps and dumps[rank].reason == RING}
        self._all_busy: ByIdentity[tuple[int, ...], bool] = ByIdentity(
            lambda ranks: (dumps.keys() & set(ranks)) <= self._busy
        )
        without_dump = set(matched.without_dump)
        self._has_none_with_dump = ByIdentity(without_dump.issuperset)
        self._more: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def with_lost(self, rank: int, record: Record, for_ranks: tuple[int, ...]) -> tuple[int, ...]:
        """`for_ranks`, and ranks that take part and are gone with their device, which may never have come to it."""
        if record.site.is_message:
            return tuple(sorted({*for_ranks, *(members_of(self._matched, rank, record) & self._lost)}))
        key = id(for_ranks), id(record.site.ranks)
        if key not in self._more:
            more = tuple(sorted({*for_ranks, *self._lost.intersection(record.site.ranks)}))
            self._more[key] = for_ranks, more
        return self._more[key][1]

    def are_sure(self, wait: Wait, *, was_left: bool) -> bool:
        """True if a device cannot have left it, though that is not marked: others have not come to it.

        Where these may leave it first, or nothing is known of them, or all have come, the devices must be known to be
        busy. `was_left`: another's device has come to a later one of the group, and so has left this one, which nobody
        does before all have come: the rank's own device is held up behind it.
        """
        is_loose = wait.record.site.operation in LOOSE
        if not wait.for_ranks:
            return self._are_busy(wait) and (is_loose or not was_left)
        return wait.rank in self._busy or (not is_loose and not self._has_none_with_dump(wait.for_ranks))

    def _are_busy(self, wait: Wait) -> bool:
        if wait.record.site.is_message:
            return members_of(self._matched, wait.rank, wait.record) <= self._busy
        return self._all_busy(wait.record.site.ranks)
