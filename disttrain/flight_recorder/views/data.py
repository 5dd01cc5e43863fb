"""The data of the page's timeline: tables of texts, and each rank's records as columns of numbers.

Columns go into the page as base64 of plain arrays, which a browser takes as they are: 28 characters for a record. Times
are seconds of rank 0's clock, as far as the ranks know how theirs differs, counted from the first of all. Torch-free.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.record.record import CallSite, Frame, Record, Stack, State
from disttrain.flight_recorder.views.words import doing

MAX_RECORDS: Final = 600_000
"""That a page holds, of all ranks together; each rank gives its last ones. That many make a page of 17 MB."""
_MIN_RECORDS_PER_RANK: Final = 100
_MAX_S: Final = 1e11
"""A few thousand years."""

OWN, LIBRARY, OURS = range(3)
"""The owner of a frame's code: the user, an installed library, disttrain."""

_STATES: Final = {State.COMPLETED: 1, State.FAILED: 2}
"""All others, 0, are of calls that have not ended."""


def shift_s(dump: Dump) -> float:
    """Seconds to add to times of this rank for those of rank 0's clock; 0 where nobody knows."""
    return _usable_s(dump.clock_offset_s or 0.0, 0.0)


def first_s(dumps: Sequence[Dump]) -> float:
    """The begin of the first record of all, by rank 0's clock."""
    begun_s = [span_s(dump, dump.records[0])[0] + shift_s(dump) for dump in dumps if dump.records]
    return min(begun_s, default=min((last_s(dump) + shift_s(dump) for dump in dumps), default=0.0))


def last_s(dump: Dump) -> float:
    """The last sign of this rank, by its own clock."""
    return max(_usable_s(time_s, 0.0) for time_s in (dump.dumped_s, *_ends_s(dump)))


def span_s(dump: Dump, record: Record) -> tuple[float, float]:
    """The begin of the call, by this rank's own clock, and how long it took, or has taken so far."""
    begun_s = _usable_s(record.enqueued_s, dump.dumped_s)
    ended_s = last_s(dump) if record.completed_s is None else _usable_s(record.completed_s, begun_s)
    return begun_s, max(0.0, ended_s - begun_s)


def whose(dump: Dump, frame: Frame) -> int:
    """OWN, LIBRARY or OURS."""
    return OURS if frame.file.startswith(dump.package) else LIBRARY if frame.file.startswith(dump.libraries) else OWN


def timeline_data(dumps: Sequence[Dump], world_size: int, blamed: Sequence[int]) -> dict[str, Any]:
    """The page's data, to be written as JSON."""
    tables = _Tables()
    start_s = first_s(dumps)
    num_records = max(_MIN_RECORDS_PER_RANK, MAX_RECORDS // max(1, len(dumps)))
    ranks = [_rank(tables, dump, start_s, num_records) | {"blamed": dump.rank in blamed} for dump in dumps]
    dumped_ranks = {dump.rank for dump in dumps}
    return {
        "startS": start_s,
        "ranks": ranks,
        "withoutDump": [rank for rank in range(world_size) if rank not in dumped_ranks],
        "blamed": list(blamed),
        "groups": [{"name": name, "axis": axis, "ranks": size} for name, axis, size in tables.groups],
        "frames": tables.frames.values,
        "stacks": tables.stacks.values,
        "labels": tables.labels.values,
        "sites": tables.sites.values,
        "isLittle": sys.byteorder == "little",
    }


@dataclass
class _Table:
    """Values in the order in which they came, each once."""

    values: list[Any] = field(default_factory=list)
    places: dict[Any, int] = field(default_factory=dict)

    def place(self, key: Any, value: Any = None) -> int:
        """The index of `value`, or else of `key` itself."""
        if key not in self.places:
            self.places[key] = len(self.values)
            self.values.append(key if value is None else value)
        return self.places[key]


@dataclass
class _Tables:
    group_places: dict[str, int] = field(default_factory=dict)
    groups: list[tuple[str, str, int]] = field(default_factory=list)
    frames: _Table = field(default_factory=_Table)
    stacks: _Table = field(default_factory=_Table)
    labels: _Table = field(default_factory=_Table)
    sites: _Table = field(default_factory=_Table)

    def stack(self, dump: Dump, stack: Stack) -> int:
        return self.stacks.place(
            tuple(self.frames.place((*frame, whose(dump, frame))) for frame in stack),
        )

    def group(self, name: str, num_ranks: int, axis_name: str) -> int:
        if name not in self.group_places:
            self.group_places[name] = len(self.groups)
            self.groups.append((name, axis_name, num_ranks))
        return self.group_places[name]

    def site(self, dump: Dump, site: CallSite, axis_names: dict[str, str]) -> int:
        group = self.group(site.group_name, len(site.ranks), axis_names.get(site.group_name, ""))
        stack = self.stack(dump, site.stack)
        return self.sites.place((group, site.operation, site.tensors, site.peer_rank, stack))


def _rank(tables: _Tables, dump: Dump, start_s: float, num_records: int) -> dict[str, Any]:
    records = dump.records[-num_records:]
    axis_names = {group.group_name: group.axis_name for group in dump.groups}
    ago_s = shift_s(dump) - start_s
    end_s = last_s(dump)
    # By identity first: a site is hashed with all that it holds, and a loop calls the same ones.
    site_of: dict[int, int] = {}
    begun, lasted = array("d"), array("f")
    sites, sequences, labels, states = array("I"), array("I"), array("I"), array("B")
    errors: dict[int, str] = {}
    for index, record in enumerate(records):
        site = site_of.get(id(record.site))
        if site is None:
            site = site_of[id(record.site)] = tables.site(dump, record.site, axis_names)
        begun_s, lasted_s = span_s(dump, record)
        begun.append(begun_s + ago_s)
        lasted.append(lasted_s)
        sites.append(site)
        sequences.append(min(max(record.sequence, 0), 0xFFFFFFFF))
        labels.append(tables.labels.place((record.action, record.module)))
        states.append(_STATES.get(record.state, 0))
        if record.error:
            errors[index] = record.error
    columns: dict[str, array[Any]] = {
        "begun": begun,
        "lasted": lasted,
        "site": sites,
        "sequence": sequences,
        "label": labels,
        "state": states,
    }
    return {
        "rank": dump.rank,
        "host": dump.host,
        "pid": dump.pid,
        "where": doing(dump),
        "end": end_s + ago_s,
        "clockError": dump.clock_error_s,
        "hasClock": dump.clock_offset_s is not None or dump.rank == 0,
        "leftOut": len(dump.records) - len(records),
        "errors": errors,
        **{name: base64.b64encode(column.tobytes()).decode() for name, column in columns.items()},
    }


def _ends_s(dump: Dump) -> list[float]:
    return [record.completed_s or record.enqueued_s for record in dump.records[-1:]]


def _usable_s(time_s: float, instead_s: float) -> float:
    """A damaged dump may name any time, and no number at all."""
    return time_s if abs(time_s) < _MAX_S else _usable_s(instead_s, 0.0)
