"""Finds which rank waits for which: from each operation that has not ended, to the ranks without which it cannot end.

Following these edges from the ranks that wait leads to ranks that wait for nobody, which hold up the others, or round
in a circle. Pure and torch-free.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Final

from disttrain.flight_recorder.analysis.alignment.match import Match
from disttrain.flight_recorder.analysis.alignment.messages import message_key
from disttrain.flight_recorder.analysis.alignment.tracks import key_of
from disttrain.flight_recorder.analysis.waiting.marked import find_marked_waits
from disttrain.flight_recorder.analysis.waiting.on_device import find_device_waits
from disttrain.flight_recorder.analysis.waiting.wait_graph import Wait
from disttrain.flight_recorder.analysis.waiting.waited_for import Missing
from disttrain.flight_recorder.analysis.wording import waited_s
from disttrain.flight_recorder.record.columns import STATE_NUMBERS, Records
from disttrain.flight_recorder.record.record import SEND, Record, State

_FAILED: Final = STATE_NUMBERS[State.FAILED]
_ENQUEUED: Final = STATE_NUMBERS[State.ENQUEUED]

MIN_WAIT_S: Final = 1.0
"""The shortest wait of a hang: if no rank had waited this long when it was dumped, there is no hang."""

UNSURE_S: Final = 10.0
"""The same if all have come. They may be connecting, or nobody may wait yet: without stacks, and on GPUs, an unfinished
operation may be one that the host has only begun."""


def find_waits(matched: Match, gone: AbstractSet[int] = frozenset()) -> list[Wait]:
    """Finds all operations in which some rank waits, or waited until they failed. Ranks that are `gone` wait no
    more."""
    missing = Missing(matched, gone)
    waits = [
        Wait(rank, record, missing.of(rank, record))
        for rank in matched.dumps
        if rank not in gone
        for record in [*_pending(matched, rank), *matched.connecting.get(rank, ())]
    ]
    if any(records.devices is not None for records in matched.records.values()):
        waits += find_marked_waits(matched, missing)
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


def _pending(matched: Match, rank: int) -> list[Record]:
    """Records that this rank hangs in. A failure that it got over does not count, nor what it has not begun to wait
    for."""
    dump, records = matched.dumps[rank], matched.records[rank]
    failed: list[int] = []
    for index, position in enumerate(reversed(records.unfinished), 1) if _FAILED in records.states else ():
        if position != len(records) - index:
            break
        if records.states[position] == _FAILED:
            failed.append(position)
    if failed or dump.is_in_transport or not dump.threads:
        enqueued = [at for at in records.unfinished if records.states[at] == _ENQUEUED]
        return _outermost(matched, rank, failed)[::-1] + _outermost(matched, rank, enqueued)
    return []


def _outermost(matched: Match, rank: int, positions: Sequence[int]) -> list[Record]:
    """Of the records of each group or channel, with each error, the first and the last that it hangs in: who has not
    come to one has not come to those after it either, and a ring may be full of what nobody has waited for."""
    records = matched.records[rank]

    def hangs(position: int) -> bool:
        return not _has_arrived(matched, rank, records[position])

    outermost: set[int] = set()
    rows: dict[Hashable, list[int]] = {}
    for order, outer in ((positions, min), (positions[::-1], max)):
        for key, position in _first_of_tracks(records, order, outer).items():
            if hangs(position):
                outermost.add(position)
                continue
            # Few have arrived, so that only then all are looked at.
            rows = rows or _by_track(records, positions)
            row = rows[key] if outer is min else rows[key][::-1]
            outermost.update(itertools.islice(filter(hangs, row), 1))
    return [records[position] for position in sorted(outermost)]


def _first_of_tracks(
    records: Records, order: Sequence[int], outer: Callable[[Sequence[int]], int]
) -> dict[Hashable, int]:
    """Of each group or channel, with each error, the first of these positions."""
    if records.errors:
        return {key: outer(row) for key, row in _by_track(records, order).items()}
    backwards = order[::-1]
    first_of_sites = dict(zip(map(records.site_numbers.__getitem__, backwards), backwards, strict=True))
    rows: dict[Hashable, list[int]] = {}
    for number, position in first_of_sites.items():
        rows.setdefault((key_of(records.sites[number]), None), []).append(position)
    return {key: outer(row) for key, row in rows.items()}


def _by_track(records: Records, positions: Sequence[int]) -> dict[Hashable, list[int]]:
    keys = list(map(key_of, records.sites))
    rows: dict[Hashable, list[int]] = {}
    for position in positions:
        rows.setdefault((keys[records.site_numbers[position]], records.errors.get(position)), []).append(position)
    return rows


def _has_arrived(matched: Match, rank: int, record: Record) -> bool:
    """True for a send that the other end has received, whatever its sender knows of that."""
    if record.site.operation != SEND:
        return False
    receive = matched.messages[message_key(rank, record)].receive
    return receive is not None and receive.state is State.COMPLETED and not receive.is_queued
