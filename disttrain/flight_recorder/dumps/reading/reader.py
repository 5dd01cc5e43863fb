"""Reads dumps: complete ones fast, cut or damaged ones as far as possible, of this and of earlier versions.

All checks of a file are here: a value that this module returns has the types that it declares. Readers skip arrays of
an unknown kind. Torch-free.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgpack

from disttrain.errors import FlightDumpError
from disttrain.flight_recorder.dumps.dump import MAGIC, Dump, packed
from disttrain.flight_recorder.dumps.reading.checked_values import (
    as_int,
    as_text,
    at,
    checked_header,
    device_times,
    finite,
)
from disttrain.flight_recorder.dumps.reading.record_mixes import find_mix
from disttrain.flight_recorder.dumps.reading.record_runs import NewestFirst, Run, find_run
from disttrain.flight_recorder.dumps.reading.replays import ReadReplays
from disttrain.flight_recorder.dumps.reading.shared_values import Shared
from disttrain.flight_recorder.record.columns import STATE_NUMBERS, STATES, Records
from disttrain.flight_recorder.record.record import (
    CallSite,
    ChannelProgress,
    DeviceTimes,
    Failure,
    GroupProgress,
    Record,
    Stack,
    State,
    ThreadStack,
)

MAX_FILE_BYTES: Final = 256 << 20
_MAX_HEADER_BYTES: Final = 1 << 16
_KINDS: Final = {
    *("dump", "stack", "group", "channel", "thread", "failure", "label", "site", "record"),
    *("graph", "replay", "end"),
}
_STATES: Final = {state.value: STATE_NUMBERS[state] for state in (State.ENQUEUED, State.COMPLETED, State.FAILED)}
_NONE: Final = type(None)
_RECORD_TYPES: Final[tuple[set[Any], ...]] = (
    *({str}, {int}, {int}, {str}, {float}, {float, _NONE}, {str, _NONE}, {int}),
    *({list, _NONE}, {float, _NONE}),
)
_WRONG: Final = (ValueError, TypeError, LookupError, OverflowError, msgpack.exceptions.StackError)
_NUM_DEVICE_TIMES: Final = len(DeviceTimes._fields)
_TIMES_ONLY: Final = frozenset({float, _NONE})
_STACK_START: Final = b"\x92" + msgpack.packb("stack")
_END_START: Final = b"\x92" + msgpack.packb("end")
_GROUP_STARTS: Final = tuple(bytes([0x90 + size]) + msgpack.packb("group") for size in range(4, 7))
"""The first bytes of a group's array, of any version."""


def read_dump(file: Path, shared: Shared | None = None) -> Dump:
    """The dump in `file`; what is missing or damaged is said in its `problems`. `shared` by those of one job.

    Raises FlightDumpError when nothing of it can be used: not a dump, a newer version, no header, unreadable.
    """
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise _unusable(file, f"has more than {MAX_FILE_BYTES >> 20} MiB")
        data = file.read_bytes()
    except OSError as error:
        raise _unusable(file, f"cannot be read ({error.strerror})") from None
    try:
        return decode(data, shared)
    except FlightDumpError as error:
        raise _unusable(file, error.problem) from None


def reason_of(file: Path) -> str:
    """Why the dump in `file` was made, without reading all of it. Raises FlightDumpError when that cannot be told."""
    try:
        with file.open("rb") as stream:
            kind, header = next(_unpacker(stream.read(_MAX_HEADER_BYTES)))
        return as_text(checked_header(header)["reason"] if kind == "dump" else None)
    except (OSError, StopIteration, *_WRONG):
        raise _unusable(file, "has no header that can be read") from None


def decode(data: bytes, shared: Shared | None = None) -> Dump:
    """The inverse of `encode`, as far as `data` goes. Raises FlightDumpError when nothing can be used."""
    if not data.startswith(MAGIC):
        raise FlightDumpError("read_dump", "is not a dump of disttrain's flight recorder")
    shared = Shared() if shared is None else shared
    end_bytes = _end_bytes(data)
    try:
        return _decode_runs(data, len(data) - end_bytes, shared, is_cut=not end_bytes)
    except (msgpack.exceptions.OutOfData, FlightDumpError, *_WRONG):
        pass  # The content may be anything, since anybody may have written it.
    if not end_bytes:
        return _decode_damaged(data, shared)
    try:
        items = list(_unpacker(data))
    except _WRONG:
        return _decode_damaged(data, shared)
    return _decode_whole(items[:-1], shared)


def _end_bytes(data: bytes) -> int:
    """The size of the array at the end that shows that nothing is missing or changed; 0 where it does not."""
    for size in range(6, 11):
        tail = data[-size:]
        if tail.startswith(_END_START):
            try:
                end = msgpack.unpackb(tail)
            except _WRONG:
                continue
            if packed(end) == tail and end[1:] == [zlib.crc32(memoryview(data)[:-size])]:
                return size
    return 0


def _decode_runs(data: bytes, stop: int, shared: Shared, *, is_cut: bool) -> Dump:
    """Decodes a dump as this version writes it, much of it at once; one that is cut as far as it goes. Raises where
    something is otherwise."""
    reader = _Reader(shared)
    columns = NewestFirst()
    unpacker = _unpacker(data)
    start, told = len(MAGIC), 0
    # After so many records without a new call site it looks for a run.
    patience, num_plain = 4, 0
    try:
        while start < stop:
            if data.startswith(_GROUP_STARTS, start) or data.startswith(_STACK_START, start):
                unpacker.skip()
                size = unpacker.tell() - told
                reader.take_shared(data[start : start + size])
                num_plain = 0
            else:
                item = unpacker.unpack()
                size = unpacker.tell() - told
                if item[0] == "record":
                    reader.raw_records.append(item)
                    num_plain += 1
                else:
                    reader.take_known(item, data[start : start + size])
                    num_plain = 0
            start += size
            told = unpacker.tell()
            if num_plain < patience:
                continue
            batch = find_run(data, start, stop) or find_mix(data, start, stop)
            if batch is None:
                patience, num_plain = min(2 * patience, 256), 0
                continue
            reader.add_raw(columns)
            if isinstance(batch, Run):
                columns.add_run(batch, _STATES[batch.state])
            else:
                columns.add_mixed([run for _, run in batch.parts], batch.order(), _STATES)
            start += batch.num_bytes
            unpacker.read_bytes(batch.num_bytes)
            told = unpacker.tell()
    except msgpack.exceptions.OutOfData:
        if not is_cut:
            raise
    reader.add_raw(columns)
    return reader.dump(reader.records_of(columns), f"is cut off after {start} bytes" if is_cut else None)


def _decode_whole(items: list[Any], shared: Shared) -> Dump:
    """Decodes a dump as far as its content can be."""
    reader = _Reader(shared)
    for item in items:
        if type(item) is list and item and item[0] == "record":
            reader.raw_records.append(item)
            continue
        try:
            reader.take(item)
        except _WRONG as error:
            return reader.finished(f"has an array that cannot be ({type(error).__name__})")
    return reader.finished(None)


def _decode_damaged(data: bytes, shared: Shared) -> Dump:
    """One after the other, up to the first that cannot be."""
    reader = _Reader(shared)
    offset = len(MAGIC)
    unpacker = _unpacker(data)
    try:
        for item in unpacker:
            match item:
                case ["end", _]:
                    return reader.finished("is damaged: what it says may be wrong")
                case ["record", *_]:
                    reader.raw_records.append(item)
                case _:
                    reader.take(item)
            offset = len(MAGIC) + unpacker.tell()
    except _WRONG as error:
        return reader.finished(f"is damaged after {offset} bytes ({type(error).__name__})")
    return reader.finished(f"is cut off after {offset} bytes")


def _unpacker(data: bytes) -> msgpack.Unpacker:
    unpacker = msgpack.Unpacker(max_buffer_size=len(data), strict_map_key=False, unicode_errors="surrogatepass")
    unpacker.feed(memoryview(data)[len(MAGIC) :])
    return unpacker


def _unusable(file: Path, problem: str) -> FlightDumpError:
    return FlightDumpError("read_dump", f"{file.name} {problem}.")


@dataclass
class _Reader:
    """Takes a dump's arrays one after the other. Raises ValueError, TypeError or LookupError for one that cannot be."""

    shared: Shared
    header: dict[str, Any] | None = None
    failure: Failure | None = None
    stacks: list[Stack] = field(default_factory=list)
    labels: list[tuple[str, str]] = field(default_factory=list)
    sites: list[CallSite] = field(default_factory=list)
    groups: dict[str, GroupProgress] = field(default_factory=dict)
    channels: list[ChannelProgress] = field(default_factory=list)
    threads: list[ThreadStack] = field(default_factory=list)
    replays: ReadReplays = field(default_factory=ReadReplays)
    raw_records: list[list[Any]] = field(default_factory=list)

    def add_raw(self, columns: NewestFirst) -> None:
        """Add the records that were decoded one by one. Their types are checked all at once. Raises ValueError."""
        raw, self.raw_records = self.raw_records, []
        if not raw:
            return
        _, sites, sequences, states, began_s, ended_s, errors, labels, devices, waits_s = decoded = list(
            zip(*raw, strict=True)
        )
        if any(not kinds.issuperset(map(type, column)) for kinds, column in zip(_RECORD_TYPES, decoded, strict=True)):
            raise ValueError("fields of other types")
        # Infinities may add up to no number too. In columns that stands for what there is not.
        if any(math.isnan(sum(filter(None, column))) for column in (began_s, ended_s, waits_s)):
            raise ValueError("not a number")
        marks = _checked_marks(devices) if any(devices) else [None] * len(devices)
        fields = [sites, sequences, began_s, ended_s, errors, labels, marks, waits_s]
        columns.add(fields, bytes(map(_STATES.__getitem__, states)))

    def records_of(self, columns: NewestFirst) -> Records:
        """The records, oldest first. Raises ValueError for numbers of what is not there."""
        num_records = len(columns.states)
        if num_records and not (max(columns.sites) < len(self.sites) and max(columns.labels) < len(self.labels)):
            raise ValueError("a number of something that is not there")
        began_s, ended_s, waits_s = (column[::-1] for column in columns.times)
        return Records(
            self.shared.listed(self.sites),
            self.shared.column(columns.sites[::-1]),
            self.shared.column(columns.sequences[::-1]),
            bytes(columns.states[::-1]),
            began_s,
            ended_s,
            {num_records - 1 - index: error for index, error in columns.errors.items()},
            tuple(self.labels),
            self.shared.column(columns.labels[::-1]),
            None if all(map(math.isnan, waits_s)) else waits_s,
            columns.devices(),
        )

    def _records_singly(self) -> Records:
        """Decodes records one by one, those of other versions too; invalid ones are left out."""
        records: list[Record] = []
        for item in self.raw_records[::-1]:
            try:
                _, site, sequence, state, began_s, ended_s, error, *more = item
                fields = at(self.sites, site), as_int(sequence), STATES[_STATES[state]], finite(began_s)
                end = None if ended_s is None else finite(ended_s), _text_or_none(error)
                label = at(self.labels, more[0]) if more else ("", "")
                device, waits_s = (*more[1:3], None, None)[:2]
                waited_from_s = None if waits_s is None else finite(waits_s)
                records.append(Record(*fields, *end, *label, device_times(device), waited_from_s))
            except _WRONG:
                continue
        return Records.of(records)

    def take_known(self, item: Any, encoded: bytes) -> None:
        """Add what `take` does, a call site of another rank faster, whose item was encoded the same."""
        match item:
            case ["site", str(name), None, _, _, _, _, _, int(stack), *_] if name in self.groups:
                key = encoded, id(self.groups[name].ranks), id(at(self.stacks, stack))
                site = self.shared.encoded_sites.get(key)
                if site is None:
                    self.take(item)
                    self.shared.encoded_sites[key] = self.sites[-1]
                else:
                    self.sites.append(site)
            case _:
                self.take(item)

    def take_shared(self, item: bytes) -> None:
        """Add a group or stack as `take` does, from its bytes: most dumps have the same, and a group has all its
        ranks."""
        decoded = self.shared.items.get(item)
        if decoded is None:
            content = msgpack.unpackb(item, strict_map_key=False, unicode_errors="surrogatepass")
            self.take(content)
            self.shared.items[item] = self.groups[content[1]] if content[0] == "group" else self.stacks[-1]
        elif isinstance(decoded, GroupProgress):
            self.groups[decoded.group_name] = decoded
        else:
            self.stacks.append(decoded)

    def take(self, item: Any) -> None:
        """Add what `item` says, if it is no record."""
        match item:
            case ["label", str(action), str(module)]:
                self.labels.append((action, module))
            case ["site", str(name), ranks, str(operation), [*inputs], [*outputs], [*dtypes], peer_rank, stack, *more]:
                progress = self.groups.get(name)
                members = self.groups[name].ranks if ranks is None else self.shared.listed_ranks(ranks)
                group = name, members, "" if progress is None else progress.axis_name
                called = operation, inputs, outputs, dtypes, peer_rank
                self.sites.append(self.shared.site(group, called, at(self.stacks, stack), more))
            case ["stack", [*frames]]:
                self.stacks.append(self.shared.stack(frames))
            case ["group", str(name), [*ranks], int(last_sequence), *more]:
                members = self.shared.listed_ranks(ranks)
                self.groups[name] = GroupProgress(name, members, last_sequence, *map(as_text, more[:2]))
            case ["channel", str(name), str(operation), int(peer_rank), int(last_sequence)]:
                self.channels.append(ChannelProgress(name, operation, peer_rank, last_sequence))
            case ["thread", str(name), bool(is_main), int(stack), *more]:
                self.threads.append(ThreadStack(name, is_main, at(self.stacks, stack), *map(as_text, more[:1])))
            case ["failure", str(kind), str(message), int(stack)]:
                self.failure = Failure(kind, message, at(self.stacks, stack))
            case ["dump", dict(header)] if self.header is None:
                self.header = checked_header(header)
            case [str(kind), *_] if kind not in _KINDS:
                return
            case _:
                self.replays.take(item, self.sites, self.labels)

    def finished(self, problem: str | None) -> Dump:
        """The dump, as far as it came. Raises FlightDumpError without a header."""
        records = self._records_singly()
        if len(records) < len(self.raw_records):
            problem = f"is damaged: {len(self.raw_records) - len(records)} of its records cannot be"
        return self.dump(records, problem)

    def dump(self, records: Records, problem: str | None) -> Dump:
        """The dump with these records. Raises FlightDumpError without a header."""
        if self.header is None:
            raise FlightDumpError("read_dump", problem or "has no header")
        return Dump(
            **self.header,
            failure=self.failure,
            groups=tuple(self.groups.values()),
            channels=tuple(self.channels),
            threads=tuple(self.threads),
            records=records,
            replays=self.replays.oldest_first(),
            problems=() if problem is None else (problem,),
        )


def _text_or_none(value: Any) -> str | None:
    return None if value is None else as_text(value)


def _checked_marks(values: Sequence[list[Any] | None]) -> Sequence[list[Any] | None]:
    """The times of devices, if all are such as `device_times` takes. Raises ValueError, TypeError."""
    columns = list(zip(*filter(None, values), strict=True))
    if (
        len(columns) != _NUM_DEVICE_TIMES
        or not all(_TIMES_ONLY.issuperset(map(type, column)) for column in columns)
        or any(math.isnan(sum(filter(None, column))) for column in columns)
    ):
        raise ValueError("not the times of a device")
    return [value or None for value in values]
