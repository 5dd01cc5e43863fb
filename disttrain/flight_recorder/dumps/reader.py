"""Reads dumps: complete ones fast, cut or damaged ones as far as possible, of this and of earlier versions.

All checks of a file are here: a value that this module returns has the types that it declares. Readers skip arrays of
an unknown kind. Torch-free.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Final, TypeVar

import msgpack

from disttrain.errors import FlightDumpError
from disttrain.flight_recorder.dumps.dump import MAGIC, VERSION, Dump, packed
from disttrain.flight_recorder.record.record import (
    CallSite,
    ChannelProgress,
    DeviceTimes,
    Failure,
    Frame,
    GroupProgress,
    Record,
    Splits,
    Stack,
    State,
    ThreadStack,
)
from disttrain.flight_recorder.record.replays import ListedCall, Replay, StepGraphCalls

MAX_FILE_BYTES: Final = 256 << 20
_MAX_HEADER_BYTES: Final = 1 << 16
MAX_WORLD_SIZE: Final = 1 << 20
_KINDS: Final = {
    "dump",
    "stack",
    "group",
    "channel",
    "thread",
    "failure",
    "label",
    "site",
    "record",
    "graph",
    "replay",
    "end",
}
_STATES: Final = {state.value: state for state in (State.ENQUEUED, State.COMPLETED, State.FAILED)}
_INT_ONLY: Final = frozenset({int})
_NONE: Final = type(None)
_RECORD_TYPES: Final[tuple[set[Any], ...]] = (
    *({str}, {int}, {int}, {str}, {float}, {float, _NONE}, {str, _NONE}, {int}),
    *({list, _NONE}, {float, _NONE}),
)
_RECORD_SIZE: Final = len(_RECORD_TYPES)
_WRONG: Final = (ValueError, TypeError, LookupError, OverflowError, msgpack.exceptions.StackError)
_NUM_DEVICE_TIMES: Final = len(DeviceTimes._fields)
_TIMES_ONLY: Final = frozenset({float, _NONE})
_NEW_DEVICE_TIMES: Final[Callable[[list[Any]], DeviceTimes]] = partial(tuple.__new__, DeviceTimes)
_NEW_RECORD: Final[Callable[[tuple[Any, ...]], Record]] = partial(tuple.__new__, Record)

T = TypeVar("T")


@dataclass
class Shared:
    """Values that the dumps of a job have in common, so that each is kept once: by the bytes that encode it."""

    stacks: dict[bytes, Stack] = field(default_factory=dict)
    sites: dict[tuple[bytes, int, int], CallSite] = field(default_factory=dict)
    ranks: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)


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
    try:
        items = list(_unpacker(data))
    except _WRONG:
        items = []
    if items and type(items[-1]) is list and items[-1][:1] == ["end"]:
        end = packed(items[-1])
        if data.endswith(end) and items[-1][1:] == [zlib.crc32(memoryview(data)[: -len(end)])]:
            return _decode_whole(items[:-1], shared)
    return _decode_damaged(data, shared)


def _decode_whole(items: list[Any], shared: Shared) -> Dump:
    """Decodes a dump in one call, in half the time. The content is still checked, since anybody may have written it."""
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
    graphs: list[StepGraphCalls] = field(default_factory=list)
    replays: list[Replay] = field(default_factory=list)
    raw_records: list[list[Any]] = field(default_factory=list)

    def records(self) -> list[Record]:
        """Oldest first. Nearly all of a dump are records, so their types are checked all at once."""
        raw = self.raw_records[::-1]
        if not raw or set(map(len, raw)) != {_RECORD_SIZE}:
            return self._records_singly()
        columns: list[Any] = list(zip(*raw, strict=True))
        _, sites, _, states, *_, labels, devices, _ = columns
        if (
            any(not kinds.issuperset(map(type, column)) for kinds, column in zip(_RECORD_TYPES, columns, strict=True))
            or not 0 <= min(sites) <= max(sites) < len(self.sites)
            or not 0 <= min(labels) <= max(labels) < len(self.labels)
            or not _STATES.keys() >= set(states)
        ):
            return self._records_singly()
        actions, modules = [label[0] for label in self.labels], [label[1] for label in self.labels]
        columns[1] = map(self.sites.__getitem__, sites)
        columns[3] = map(_STATES.__getitem__, states)
        try:
            columns[8] = _all_device_times(devices) if any(devices) else devices
        except _WRONG:
            return self._records_singly()
        columns[7:8] = map(actions.__getitem__, labels), map(modules.__getitem__, labels)
        columns.append(repeat(""))
        return list(map(_NEW_RECORD, zip(*columns[1:], strict=False)))

    def _records_singly(self) -> list[Record]:
        """Decodes records one by one, those of other versions too; invalid ones are left out."""
        records: list[Record] = []
        for item in self.raw_records[::-1]:
            try:
                _, site, sequence, state, began_s, ended_s, error, *more = item
                fields = _at(self.sites, site), as_int(sequence), _STATES[state], _finite(began_s)
                end = None if ended_s is None else _finite(ended_s), _text_or_none(error)
                label = _at(self.labels, more[0]) if more else ("", "")
                device, waits_s = (*more[1:3], None, None)[:2]
                waited_from_s = None if waits_s is None else _finite(waits_s)
                records.append(Record(*fields, *end, *label, _device_times(device), waited_from_s))
            except _WRONG:
                continue
        return records

    def take(self, item: Any) -> None:
        """Add what `item` says, if it is no record."""
        match item:
            case ["label", str(action), str(module)]:
                self.labels.append((action, module))
            case ["site", str(name), ranks, str(operation), [*inputs], [*outputs], [*dtypes], peer_rank, stack, *more]:
                group_ranks = self.groups[name].ranks if ranks is None else self._ranks(ranks)
                # Without the stack's number, which differs between ranks.
                key = (packed([*item[:8], *more]), id(group_ranks), id(_at(self.stacks, stack)))
                site = self.shared.sites.get(key)
                if site is None:
                    shapes = tuple(map(as_ints, inputs)), tuple(map(as_ints, outputs))
                    peer = None if peer_rank is None else as_int(peer_rank)
                    axis_name = self.groups[name].axis_name if name in self.groups else ""
                    called = (name, group_ranks, operation, *shapes, tuple(map(as_text, dtypes)), peer)
                    site = self.shared.sites[key] = CallSite(
                        *called, _at(self.stacks, stack), axis_name, *more_of_site(more)
                    )
                self.sites.append(site)
            case ["stack", [*frames]]:
                frames_key = packed(frames)
                stack = self.shared.stacks.get(frames_key)
                if stack is None:
                    frame_of = (Frame(as_text(file), as_int(line), as_text(name)) for file, line, name in frames)
                    stack = self.shared.stacks[frames_key] = tuple(frame_of)
                self.stacks.append(stack)
            case ["group", str(name), [*ranks], int(last_sequence), *more]:
                group = GroupProgress(name, self._ranks(ranks), last_sequence, *map(as_text, more[:2]))
                self.groups[name] = group
            case ["channel", str(name), str(operation), int(peer_rank), int(last_sequence)]:
                self.channels.append(ChannelProgress(name, operation, peer_rank, last_sequence))
            case ["thread", str(name), bool(is_main), int(stack), *more]:
                self.threads.append(ThreadStack(name, is_main, _at(self.stacks, stack), *map(as_text, more[:1])))
            case ["failure", str(kind), str(message), int(stack)]:
                self.failure = Failure(kind, message, _at(self.stacks, stack))
            case ["dump", dict(header)] if self.header is None:
                self.header = checked_header(header)
            case [str(kind), *_] if kind not in _KINDS:
                return
            case _:
                self._take_replays(item)

    def _take_replays(self, item: Any) -> None:
        match item:
            case ["graph", int(number), [*calls]]:
                listed = (
                    ListedCall(_at(self.sites, site), *_at(self.labels, label), as_int(part))
                    for site, label, part in calls
                )
                self.graphs.append(StepGraphCalls(number, tuple(listed)))
            case ["replay", graph, int(number), [*before], began_s, ended_s, device, not_come]:
                end_s = None if ended_s is None else _finite(ended_s)
                behind = None if not_come is None else as_ints(not_come)
                its_graph, counts = _at(self.graphs, graph), as_ints(before)
                for call in its_graph.calls:
                    _at(counts, call.part)
                fields = its_graph, number, counts, _finite(began_s), end_s, _device_times(device), behind
                self.replays.append(Replay(*fields))
            case _:
                raise ValueError("an array that no dump has")

    def _ranks(self, ranks: Any) -> tuple[int, ...]:
        group_ranks = as_ints(ranks)
        return self.shared.ranks.setdefault(group_ranks, group_ranks)

    def finished(self, problem: str | None) -> Dump:
        """The dump, as far as it came. Raises FlightDumpError without a header."""
        if self.header is None:
            raise FlightDumpError("read_dump", problem or "has no header")
        records = self.records()
        if len(records) < len(self.raw_records):
            problem = f"is damaged: {len(self.raw_records) - len(records)} of its records cannot be"
        return Dump(
            **self.header,
            failure=self.failure,
            groups=tuple(self.groups.values()),
            channels=tuple(self.channels),
            threads=tuple(self.threads),
            records=tuple(records),
            replays=tuple(reversed(self.replays)),
            problems=() if problem is None else (problem,),
        )


def checked_header(header: dict[Any, Any]) -> dict[str, Any]:
    """The header's fields for `Dump`. Raises FlightDumpError for a version that this reader does not know."""
    version = as_int(header.get("version"))
    if version > VERSION:
        raise FlightDumpError("read_dump", f"has format version {version}; this disttrain-flight knows up to {VERSION}")
    rank, world_size = as_int(header.get("rank")), as_int(header.get("world_size"))
    if not 0 <= rank < world_size <= MAX_WORLD_SIZE:
        raise ValueError("a rank outside its world")
    versions, libraries = header.get("versions"), header.get("libraries")
    if not isinstance(versions, dict) or not isinstance(libraries, list):
        raise TypeError("versions or libraries of another type")
    return {
        "rank": rank,
        "world_size": world_size,
        "pid": as_int(header.get("pid")),
        **{name: as_text(header.get(name)) for name in ("job", "host", "reason", "package")},
        **{name: _finite(header.get(name)) for name in ("started_s", "dumped_s")},
        **{
            name: None if header.get(name) is None else _finite(header[name])
            for name in ("clock_offset_s", "clock_error_s")
        },
        "device_is_busy": header["device_is_busy"] if isinstance(header.get("device_is_busy"), bool) else None,
        "versions": {as_text(name): as_text(version) for name, version in versions.items()},
        "libraries": tuple(map(as_text, libraries)),
    }


def _at(values: Sequence[T], index: Any) -> T:
    if not 0 <= as_int(index) < len(values):
        raise IndexError("a number of something that did not come before")
    return values[as_int(index)]


def as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _text_or_none(value: Any) -> str | None:
    return None if value is None else as_text(value)


def as_int(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("not a whole number")
    return value


def as_ints(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not _INT_ONLY.issuperset(map(type, values)):
        raise TypeError("not a list of whole numbers")
    return tuple(values)


def more_of_site(more: Sequence[Any]) -> tuple[str, Splits]:
    """The reduction and the splits of a site, which early versions did not have. Raises TypeError."""
    if len(more) < 2:
        return "", ()
    reduction, splits = more[:2]
    return as_text(reduction), () if splits is None else tuple(map(as_ints, splits))


def _all_device_times(values: Sequence[list[Any] | None]) -> list[DeviceTimes | None]:
    """Decodes device times as `_device_times` does, but faster. Raises ValueError, TypeError."""
    columns = list(zip(*filter(None, values), strict=True))
    if len(columns) != _NUM_DEVICE_TIMES or not all(_TIMES_ONLY.issuperset(map(type, column)) for column in columns):
        raise ValueError("not the times of a device")
    return [_NEW_DEVICE_TIMES(value) if value else None for value in values]


def _device_times(value: Any) -> DeviceTimes | None:
    if value is None:
        return None
    came_s, left_s, waits_s, *_ = value
    return DeviceTimes(*(None if time_s is None else _finite(time_s) for time_s in (came_s, left_s, waits_s)))


def _finite(value: Any) -> float:
    if not isinstance(value, float) or not math.isfinite(value):
        raise ValueError("not a finite number")
    return value
