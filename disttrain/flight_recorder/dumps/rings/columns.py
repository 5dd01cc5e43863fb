"""The records in a ring's slots, a column at a time: one after the other they take four times as long. Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import nan
from operator import ne
from typing import NamedTuple, TypeVar

from disttrain.flight_recorder.dumps.reading.shared_values import Shared
from disttrain.flight_recorder.record.columns import STATE_NUMBERS, Ints, Records, device_columns
from disttrain.flight_recorder.record.record import CallSite, DeviceTimes, State

_ENQUEUED, _COMPLETED, _FAILED = (STATE_NUMBERS[state] for state in (State.ENQUEUED, State.COMPLETED, State.FAILED))

Key = TypeVar("Key")
Value = TypeVar("Value")


class Slots(NamedTuple):
    """The columns of all slots, as in `layout.SLOT`."""

    numbers: Ints = ()
    sites: Ints = ()
    labels: Ints = ()
    sequences: Ints = ()
    flags: Ints = ()
    began_ns: Ints = ()
    waits_ns: Ints = ()
    ended_ns: Ints = ()
    numbers_again: Ints = ()

    @classmethod
    def of(cls, columns: Iterable[Sequence[int]]) -> Slots:
        """The `columns`, as the ring has them, from the slot that was written first on."""
        listed = [list(column) for column in columns]
        first = listed[0].index(min(listed[0])) if listed[0] else 0
        return cls(*(column[first:] + column[:first] for column in listed))

    @property
    def num_torn(self) -> int:
        """Slots that were being written."""
        return 0 if self.numbers == self.numbers_again else sum(map(ne, self.numbers, self.numbers_again))

    def whole(self) -> Sequence[int]:
        """The indexes of the slots with a record, oldest first."""
        if self.numbers == self.numbers_again and 0 not in self.began_ns:
            indexes: Sequence[int] = range(len(self.numbers))
            if self.numbers == sorted(self.numbers):
                return indexes
        else:
            columns = zip(self.numbers, self.began_ns, self.numbers_again, strict=True)
            indexes = [index for index, (number, began, again) in enumerate(columns) if number == again and began]
        return sorted(indexes, key=self.numbers.__getitem__)


def records_of(
    slots: Slots,
    indexes: Sequence[int],
    sites: Mapping[int, CallSite],
    labels: Mapping[int, tuple[str, str]],
    errors: Mapping[int, str],
    epoch_ns: int,
    device_of: Callable[[int], DeviceTimes | None] | None,
    shared: Shared,
) -> Records:
    """The records in the slots with these `indexes`, in their order.

    Args: sites, labels, errors  by the numbers that slots have for them;  epoch_ns  added to its times makes them those
          since the epoch;  device_of  a record by its number; None: of none is anything known.
    """

    are_all = indexes == range(len(slots.numbers))

    def column(values: Ints) -> Ints:
        return values if are_all else list(map(values.__getitem__, indexes))

    numbers, flags, ended_ns = map(column, (slots.numbers, slots.flags, slots.ended_ns))
    known_sites, site_numbers = _listed(column(slots.sites), sites)
    known_labels, label_numbers = _listed(column(slots.labels), labels)
    waits_ns = column(slots.waits_ns)
    states = bytearray([_COMPLETED]) * len(indexes)
    failed = [index for index, flag in enumerate(flags) if flag & 1] if any(flags) else []
    for index in failed:
        states[index] = _FAILED
    for index in [index for index, end_ns in enumerate(ended_ns) if not end_ns]:
        states[index] = _ENQUEUED
    devices = None if device_of is None else list(map(device_of, numbers))

    def known(values_ns: Ints) -> array[float]:
        if all(values_ns):
            return array("d", [value_ns / 1e9 for value_ns in map(epoch_ns.__add__, values_ns)])
        return array("d", [(value_ns + epoch_ns) / 1e9 if value_ns else nan for value_ns in values_ns])

    return Records(
        sites=shared.listed(known_sites),
        site_numbers=shared.column(site_numbers),
        sequences=shared.column(array("q", column(slots.sequences))),
        states=bytes(states),
        enqueued_s=known(column(slots.began_ns)),
        completed_s=known(ended_ns),
        errors={
            index: errors[numbers[index]] for index in failed if states[index] == _FAILED and numbers[index] in errors
        },
        labels=known_labels,
        label_numbers=shared.column(label_numbers),
        waits_s=known(waits_ns) if any(waits_ns) else None,
        devices=device_columns(devices) if devices and any(devices) else None,
    )


def _listed(numbers: Sequence[int], values: Mapping[int, Value]) -> tuple[tuple[Value, ...], array[int]]:
    """The values of these numbers, each once, and their indexes among them."""
    index_of = {number: index for index, number in enumerate(sorted(set(numbers)))}
    if len(index_of) == 1:
        return tuple(map(values.__getitem__, index_of)), array("I", [0]) * len(numbers)
    return tuple(map(values.__getitem__, index_of)), array("I", list(map(index_of.__getitem__, numbers)))
