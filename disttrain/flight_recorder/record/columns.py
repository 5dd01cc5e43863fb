"""The records of one rank as columns: a full ring takes a tenth of the memory, and ranks that did the same share parts.

A sequence of `Record`s, each of which is made when it is asked for.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan, nan
from typing import Any, Final, NamedTuple, overload

from disttrain.flight_recorder.record.record import CallSite, DeviceTimes, Record, State

STATES: Final = tuple(State)
COMPLETED: Final = STATES.index(State.COMPLETED)
STATE_NUMBERS: Final = {state: number for number, state in enumerate(STATES)}

_IS_UNFINISHED: Final = bytes(number != COMPLETED for number in range(256))

Ints = Sequence[int]
Times = Sequence[float]
"""Seconds; NaN where there is none."""


class DeviceColumns(NamedTuple):
    """The columns of `DeviceTimes`, and which records have any."""

    is_known: bytes
    came_s: Times
    left_s: Times
    waits_s: Times


@dataclass(frozen=True, eq=False)
class Records(Sequence[Record]):
    """The fields of `Record`, a column each. `sites` and `labels` (action and module) are listed once, and named by
    number; `states` are numbers in `STATES`; `errors` and `replays` are by position; `waits_s` and `devices` are None
    where no record has any."""

    sites: Sequence[CallSite]
    site_numbers: Ints
    sequences: Ints
    states: bytes
    enqueued_s: Times
    completed_s: Times
    errors: dict[int, str]
    labels: Sequence[tuple[str, str]]
    label_numbers: Ints
    waits_s: Times | None = None
    devices: DeviceColumns | None = None
    replays: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[Record]) -> Records:
        """The columns of these records."""
        if isinstance(records, Records):
            return records
        rows = list(records)
        # A dump has one object for all calls of a site: hashing what it holds would take longer than all else.
        sites = list({id(row.site): row.site for row in rows}.values())
        number_of = {id(site): number for number, site in enumerate(sites)}
        labels = list(dict.fromkeys((row.action, row.module) for row in rows))
        label_of = {label: number for number, label in enumerate(labels)}
        has_waits = any(row.waits_s is not None for row in rows)
        has_devices = any(row.device is not None for row in rows)
        return cls(
            sites=sites,
            site_numbers=array("I", [number_of[id(row.site)] for row in rows]),
            sequences=integers([row.sequence for row in rows]),
            states=bytes(STATE_NUMBERS[row.state] for row in rows),
            enqueued_s=times([row.enqueued_s for row in rows]),
            completed_s=times([row.completed_s for row in rows]),
            errors={index: row.error for index, row in enumerate(rows) if row.error is not None},
            labels=labels,
            label_numbers=array("I", [label_of[row.action, row.module] for row in rows]),
            waits_s=times([row.waits_s for row in rows]) if has_waits else None,
            devices=device_columns([row.device for row in rows]) if has_devices else None,
            replays={index: row.replay for index, row in enumerate(rows) if row.replay},
        )

    def __len__(self) -> int:
        return len(self.states)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Record, ...]: ...
    def __getitem__(self, index: int | slice) -> Record | tuple[Record, ...]:
        if isinstance(index, slice):
            return tuple(map(self._at, range(*index.indices(len(self)))))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._at(index % len(self))

    def __iter__(self) -> Iterator[Record]:
        return map(self._at, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Records | tuple):
            return NotImplemented
        return tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Iterable[Record]) -> tuple[Record, ...]:
        return (*self, *other)

    def _at(self, index: int) -> Record:
        action, module = self.labels[self.label_numbers[index]]
        return Record(
            self.sites[self.site_numbers[index]],
            self.sequences[index],
            STATES[self.states[index]],
            self.enqueued_s[index],
            _known(self.completed_s[index]),
            self.errors.get(index) if self.errors else None,
            action,
            module,
            None if self.devices is None else _device_at(self.devices, index),
            None if self.waits_s is None else _known(self.waits_s[index]),
            self.replays.get(index, "") if self.replays else "",
        )

    def site_at(self, index: int) -> CallSite:
        """The call site of one record."""
        return self.sites[self.site_numbers[index]]

    def state_at(self, index: int) -> State:
        """The state of one record."""
        return STATES[self.states[index]]

    @cached_property
    def unfinished(self) -> list[int]:
        """The positions of all records that are not completed."""
        return [*itertools.compress(range(len(self.states)), self.states.translate(_IS_UNFINISHED))]

    def waits(self) -> list[tuple[float, float]]:
        """Begin and end of each wait that has ended: `Record.wait_s` of all records."""
        began_s: Iterable[float] = self.enqueued_s
        if self.waits_s is not None:
            began_s = (max(b, w) for b, w in zip(began_s, self.waits_s, strict=True))
        if self.devices is None:
            return [(began, end) for began, end in zip(began_s, self.completed_s, strict=True) if end == end]
        spans = [
            (host, ended) if isnan(came) else (max(came, waits), left)
            for host, ended, came, left, waits in zip(began_s, self.completed_s, *self.devices[1:], strict=True)
        ]
        return [(began, end) for began, end in spans if end == end]


def integers(values: Sequence[int]) -> Ints:
    """A column of whole numbers; damaged files have such as 64 bits do not hold."""
    try:
        return array("q", values)
    except OverflowError:
        return list(values)


def times(values: Sequence[float | None]) -> array[float]:
    """A column of times."""
    return array("d", [nan if value is None else value for value in values])


def device_columns(values: Sequence[Sequence[float | None] | None]) -> DeviceColumns:
    """The columns of what records know of their device, as `DeviceTimes` has it."""
    nothing = (None,) * len(DeviceTimes._fields)
    columns: list[Any] = list(zip(*(nothing if value is None else value for value in values), strict=True))
    return DeviceColumns(bytes(value is not None for value in values), *map(times, columns))


def _known(time_s: float) -> float | None:
    return time_s if time_s == time_s else None


def _device_at(devices: DeviceColumns, index: int) -> DeviceTimes | None:
    if not devices.is_known[index]:
        return None
    return DeviceTimes(*(_known(column[index]) for column in devices[1:]))
