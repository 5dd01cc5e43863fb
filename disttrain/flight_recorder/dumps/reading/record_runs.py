"""Decodes runs of records that are encoded alike: a column at a time, in a fifth of the time of one after the other.

Nearly all records of a dump differ in numbers only, so each takes as many bytes as the one before, and the same field
stands every so many bytes. Torch-free.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isnan, nan
from operator import itemgetter
from typing import Any, Final

from disttrain.flight_recorder.record.columns import DeviceColumns, times

LEAST: Final = 16
"""Shorter runs are faster one record after the other."""
_FIRST: Final = 64
HEAD: Final = b"\x9a\xa6record"
"""The first bytes of each record."""
_SMALL: Final = bytes(range(0x80))
_NO_TIME: Final = array("d", [nan])
_NONE: Final = b"\xc0"
_FLOAT: Final = b"\xcb"
_MAX_TEXT: Final = 32
_WIDTHS: Final = {0xCC: 1, 0xCD: 2, 0xCE: 4}
_WIDTH_CODES: Final = [bytes([code]) for code in _WIDTHS]

Span = tuple[int, int]
"""Where a number begins within a record, and its bytes."""


@dataclass
class Run:
    """Columns of `num_records` records, the newest first, which take `num_bytes`; None for times that none has."""

    num_records: int
    num_bytes: int
    sites: array[int]
    sequences: array[int]
    state: str
    labels: array[int]
    times: list[array[float] | None]
    marks: list[array[float] | None] | None

    def first(self, count: int) -> Run:
        """The newest `count` of them."""
        if count == self.num_records:
            return self
        times, marks = (
            None if columns is None else [None if column is None else column[:count] for column in columns]
            for columns in (self.times, self.marks)
        )
        numbers = self.sites[:count], self.sequences[:count], self.state, self.labels[:count]
        return Run(count, self.num_bytes // self.num_records * count, *numbers, times or [], marks)


@dataclass
class _Layout:
    """The bytes that are fixed in a run, and the fields. Raises ValueError for a record that is encoded otherwise."""

    data: bytes
    start: int
    offset: int = 0
    fixed: list[tuple[int, bytes]] = field(default_factory=list)

    def expect(self, *choices: bytes) -> bytes:
        prefix = next((each for each in choices if self.data.startswith(each, self.start + self.offset)), None)
        if prefix is None:
            raise ValueError("encoded otherwise")
        for byte in prefix:
            self.fixed.append((self.offset, bytes([byte])))
            self.offset += 1
        return prefix

    def integer(self) -> Span:
        first = self.data[self.start + self.offset]
        if first < len(_SMALL):
            self.fixed.append((self.offset, _SMALL))
            self.offset += 1
            return self.offset - 1, 1
        self.expect(*_WIDTH_CODES)
        self.offset += _WIDTHS[first]
        return self.offset - _WIDTHS[first], _WIDTHS[first]

    def time(self) -> Span | None:
        if self.expect(_NONE, _FLOAT) == _NONE:
            return None
        self.offset += 8
        return self.offset - 8, 8

    def text(self) -> str:
        size = self.data[self.start + self.offset] - 0xA0
        if not 0 <= size < _MAX_TEXT:
            raise ValueError("encoded otherwise")
        at = self.start + self.offset
        return self.expect(self.data[at : at + 1 + size])[1:].decode()


def find_run(data: bytes, start: int, stop: int, least: int = LEAST) -> Run | None:
    """The records from `start` on that are encoded as the first one; None where there are not `least`."""
    layout = _Layout(data, start)
    try:
        layout.expect(HEAD)
        numbers = layout.integer(), layout.integer()
        state = layout.text()
        spans = [layout.time(), layout.time()]
        layout.expect(_NONE)  # no error
        label = layout.integer()
        is_marked = layout.expect(_NONE, b"\x93") != _NONE
        marks = [layout.time() for _ in range(3)] if is_marked else None
        spans.append(layout.time())
    except (ValueError, IndexError):
        return None
    stride = layout.offset
    most = (stop - start) // stride
    num_records = _extent(data, start, stride, layout.fixed, min(most, _FIRST))
    if num_records < least:
        return None
    if num_records == _FIRST:
        num_records = _extent(data, start, stride, layout.fixed, most)
    region = data[start : start + num_records * stride]

    def integers(span: Span, typecode: str) -> array[int]:
        return array(typecode, _numbers(region, stride, span, array(typecode).itemsize))

    def floats(span: Span | None) -> array[float] | None:
        return None if span is None else array("d", _numbers(region, stride, span, 8))

    return Run(
        num_records,
        len(region),
        integers(numbers[0], "I"),
        integers(numbers[1], "q"),
        state,
        integers(label, "I"),
        list(map(floats, spans)),
        None if marks is None else list(map(floats, marks)),
    )


def _extent(data: bytes, start: int, stride: int, fixed: list[tuple[int, bytes]], most: int) -> int:
    """The number of records, `most` at most, that have the fixed bytes."""
    region = data[start : start + most * stride]
    for offset, allowed in fixed:
        column = region[offset::stride]
        # To compare all of them is ten times faster than to look for the first that differs.
        if not (column.isascii() if allowed is _SMALL else column == allowed * len(column)):
            most = min(most, len(column) - len(column.lstrip(allowed)))
    return most


def _numbers(region: bytes, stride: int, span: Span, item_bytes: int) -> bytes:
    """The bytes of a column of items, in this machine's order; numbers are stored with the highest byte first."""
    offset, width = span
    column = bytearray(len(region) // stride * item_bytes)
    for index in range(width):
        target = index if sys.byteorder == "little" else item_bytes - 1 - index
        column[target::item_bytes] = region[offset + width - 1 - index :: stride]
    return bytes(column)


class NewestFirst:
    """Collects the columns of a dump's records, in runs and one by one, as the file has them."""

    def __init__(self) -> None:
        self.sites, self.labels = array("I"), array("I")
        self.sequences = array("q")
        self.states = bytearray()
        self.times = [array("d") for _ in range(3)]
        self.errors: dict[int, str] = {}
        self._is_known = bytearray()
        self._marks = [array("d") for _ in range(3)]

    def add_run(self, run: Run, state: int) -> None:
        num_records = run.num_records
        for column, values in ((self.sites, run.sites), (self.labels, run.labels), (self.sequences, run.sequences)):
            column.extend(values)
        self.states += bytes([state]) * num_records
        nothing = _NO_TIME * num_records
        for target, source in zip(self.times + self._marks, run.times + (run.marks or [None] * 3), strict=True):
            # Infinities may add up to no number too. In columns that stands for what there is not.
            if source is not None and isnan(sum(source)):
                raise ValueError("not a number")
            target.extend(nothing if source is None else source)
        self._is_known += bytes([run.marks is not None]) * num_records

    def add_mixed(self, runs: Iterable[Run], order: list[int], states: dict[str, int]) -> None:
        """The records of several runs, in this order of their indexes among them all."""
        before = len(self.states)
        for run in runs:
            self.add_run(run, states[run.state])
        in_order = itemgetter(*order)

        def put_in_order(column: Any) -> None:
            added = column[before:]
            encoded = bytes(added)
            item_bytes = len(encoded) // len(order)
            # Where all have the same, as what no record has, there is no order. By bytes, since NaN does not equal
            # itself.
            if encoded[item_bytes:] == encoded[:-item_bytes]:
                return
            ordered = in_order(added)
            column[before:] = array(added.typecode, ordered) if isinstance(added, array) else bytes(ordered)

        for column in (self.sites, self.labels, self.sequences, self.states, self._is_known, *self.times, *self._marks):
            put_in_order(column)

    def add(self, columns: list[Any], states: bytes) -> None:
        """Those of checked records: `columns` as the file has them, but for the states and the marks."""
        sites, sequences, began_s, ended_s, errors, labels, marks, waits_s = columns
        self.errors |= {len(self.states) + at: error for at, error in enumerate(errors) if error is not None}
        self.sites.extend(sites)
        self.labels.extend(labels)
        self.sequences.extend(sequences)
        self.states += states
        for target, values in zip(self.times, (began_s, ended_s, waits_s), strict=True):
            target.extend(times(values))
        for target, values in zip(self._marks, zip(*(mark or (None,) * 3 for mark in marks), strict=True), strict=True):
            target.extend(times(values))
        self._is_known += bytes(mark is not None for mark in marks)

    def devices(self) -> DeviceColumns | None:
        """The marks, oldest first."""
        if not any(self._is_known):
            return None
        return DeviceColumns(bytes(self._is_known[::-1]), *(column[::-1] for column in self._marks))
