"""Decodes a ring file as a dump: of a process that was killed, or of a live one at this moment.

Whatever the bytes, the result is a dump or a FlightDumpError. Torch-free.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgpack

from disttrain.errors import FlightDumpError
from disttrain.flight_recorder.dumps.dump import RING, Dump
from disttrain.flight_recorder.dumps.reading.checked_values import as_int, checked_header
from disttrain.flight_recorder.dumps.reading.reader import MAX_FILE_BYTES
from disttrain.flight_recorder.dumps.reading.shared_values import Shared
from disttrain.flight_recorder.dumps.rings.columns import Slots, records_of
from disttrain.flight_recorder.dumps.rings.replays import ListedParts
from disttrain.flight_recorder.record.columns import Records
from disttrain.flight_recorder.record.record import (
    CallSite,
    ChannelProgress,
    DeviceTimes,
    Frame,
    GroupProgress,
    Stack,
    ThreadStack,
)
from disttrain.flight_recorder.record.ring import layout

_WRONG: Final = (ValueError, TypeError, LookupError, OverflowError, struct.error, msgpack.exceptions.StackError)
_MAX_STACKS_BYTES: Final = 1 << 20
_THREAD: Final = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\(most recent call first\):")
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+) in (.*)')

MarkedNs = tuple[int | None, int | None, int | None]
"""As `DeviceTimes`, in ns of the monotonic clock."""


def read_ring(file: Path, shared: Shared | None = None) -> Dump:
    """The dump in the ring `file`, with the stacks of all threads where its process could still leave them beside it.
    `shared` by those of one job.

    Raises FlightDumpError when nothing of it can be used.
    """
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise FlightDumpError("read_ring", f"{file.name} has more than {MAX_FILE_BYTES >> 20} MiB.")
        data = file.read_bytes()
    except OSError as error:
        raise FlightDumpError("read_ring", f"{file.name} cannot be read ({error.strerror}).") from None
    try:
        dump, main_thread = decode_ring(data, shared=shared)
    except FlightDumpError as error:
        raise FlightDumpError("read_ring", f"{file.name} {error.problem}.") from None
    try:
        # The ring may be a link; its stacks lie where it lies.
        lies_at = file.resolve() if file.is_symlink() else file
        with lies_at.with_suffix(layout.STACKS_SUFFIX).open("rb") as stream:
            text = stream.read(_MAX_STACKS_BYTES).decode(errors="replace")
    except OSError:
        return dump
    return replace(dump, threads=parse_stacks(text, main_thread))


def decode_ring(
    data: bytes,
    marked_ns: Mapping[int, MarkedNs] = MappingProxyType({}),
    progress: Mapping[int, Sequence[int]] = MappingProxyType({}),
    shared: Shared | None = None,
) -> tuple[Dump, int]:
    """Decodes the bytes of a ring file. Returns its dump, and the identity of its main thread. Raises FlightDumpError.

    `marked_ns`: of records, by number, what their process knows of its device (`record/device/marks.py`).
    `progress`: likewise of recorded steps, by number (`record/device/graph_progress.py`).
    """
    entries, version, num_counters, entries_at = _read_entries(data, Shared() if shared is None else shared)
    slots = memoryview(data)[layout.slots_at(num_counters) : entries_at]
    dump = entries.dump(data, num_counters, Slots.of(layout.columns_of(slots, version)), marked_ns, progress)
    return dump, entries.main_thread


def sites_of(data: bytes) -> dict[int, CallSite]:
    """The call sites in the bytes of a ring, by number. Raises FlightDumpError."""
    return _read_entries(data, Shared())[0].sites


def _read_entries(data: bytes, shared: Shared) -> tuple[_Entries, int, int, int]:
    """The entries of a ring; its version, number of counters, and where the entries begin. Raises FlightDumpError."""
    if not data.startswith(layout.MAGIC):
        raise FlightDumpError("read_ring", "is not a ring of disttrain's flight recorder")
    try:
        version, num_slots, num_counters, entries_at = layout.LAYOUT.unpack_from(data, layout.LAYOUT_AT)
        (order,) = struct.unpack_from("@Q", data, layout.ORDER_AT)
    except struct.error:
        raise FlightDumpError("read_ring", "is cut off in its head") from None
    if order != 1:
        raise FlightDumpError("read_ring", "is of a machine with another byte order, or damaged")
    if version > layout.VERSION:
        raise FlightDumpError(
            "read_ring", f"has format version {version}; this disttrain-flight knows up to {layout.VERSION}"
        )
    if entries_at != layout.entries_at(num_slots, num_counters, version) or len(data) < entries_at:
        raise FlightDumpError("read_ring", "is cut off in its head, or damaged")
    entries = _Entries(shared)
    for entry in _unpacked(data, entries_at, entries.problems):
        try:
            entries.take(entry)
        except _WRONG as error:
            entries.problems.append(f"has an entry that cannot be ({type(error).__name__})")
    return entries, version, num_counters, entries_at


class Owner(NamedTuple):
    """The process of a ring: its number, when it was started (`start_of`), and its last sign of life, in monotonic
    ns."""

    pid: int
    start: int
    alive_ns: int


def ring_owner(file: Path) -> Owner | None:
    """The process of a ring; None when it cannot be read."""
    try:
        with file.open("rb") as stream:
            head = stream.read(layout.COUNTERS_AT)
            (*_, offset), (alive_ns,) = (
                layout.LAYOUT.unpack_from(head, layout.LAYOUT_AT),
                struct.unpack_from("@Q", head, layout.ALIVE_AT),
            )
            stream.seek(offset)
            size, _ = layout.ENTRY.unpack(stream.read(layout.ENTRY.size))
            _, header = msgpack.unpackb(stream.read(size), unicode_errors="surrogatepass")
            return Owner(as_int(header["pid"]), as_int(header.get("process_start", 0)), alive_ns)
    except (OSError, *_WRONG):
        return None


def parse_stacks(text: str, main_thread: int = 0) -> tuple[ThreadStack, ...]:
    """The last stacks that `faulthandler` has written to `text`, the main thread's first."""
    threads: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.rpartition("Timeout (")[2].splitlines():
        if header := _THREAD.match(line):
            frames = threads.setdefault(int(header[1], 16), [])
        elif frame := _FRAME.match(line):
            frames.append(Frame(frame[1], int(frame[2]), frame[3]))
    named = [
        ThreadStack("MainThread" if ident == main_thread else f"thread {ident:#x}", ident == main_thread, tuple(stack))
        for ident, stack in threads.items()
    ]
    return tuple(sorted(named, key=lambda thread: not thread.is_main))


def _unpacked(data: bytes, offset: int, problems: list[str]) -> Iterator[Any]:
    """The entries from `place` on, up to the first that is not whole."""
    while offset + layout.ENTRY.size <= len(data):
        size, checksum = layout.ENTRY.unpack_from(data, offset)
        body = memoryview(data)[offset + layout.ENTRY.size : offset + layout.ENTRY.size + size]
        if len(body) < size or zlib.crc32(body) != checksum:
            break
        try:
            yield msgpack.unpackb(body, strict_map_key=False, unicode_errors="surrogatepass")
        except _WRONG:
            break
        offset += layout.ENTRY.size + size
    if offset < len(data):
        problems.append(f"is cut off or damaged after {offset} bytes")


@dataclass
class _Entries:
    """The entries of a ring that have been read so far."""

    shared: Shared
    header: dict[str, Any] | None = None
    main_thread: int = 0
    epoch_ns: int = 0
    clock: tuple[float | None, float | None] = (None, None)
    process: str = ""
    groups: dict[str, tuple[GroupProgress, int]] = field(default_factory=dict)
    channels: list[tuple[ChannelProgress, int]] = field(default_factory=list)
    stacks: dict[int, Stack] = field(default_factory=dict)
    sites: dict[int, CallSite] = field(default_factory=dict)
    labels: dict[int, tuple[str, str]] = field(default_factory=lambda: {0: ("", "")})
    errors: dict[int, str] = field(default_factory=dict)
    listed: ListedParts = field(default_factory=ListedParts)
    problems: list[str] = field(default_factory=list)

    def take(self, entry: Any) -> None:
        """Add what `entry` says. Raises ValueError, TypeError or LookupError for one that cannot be."""
        match entry:
            case ["site", int(number), str(group), str(operation), [*ins], [*outs], [*dtypes], peer, int(stack), *more]:
                progress, _ = self.groups[group]
                members = group, progress.ranks, progress.axis_name
                tensors = ins, outs, dtypes
                self.sites[number] = self.shared.site(members, (operation, *tensors, peer), self.stacks[stack], more)
            case ["stack", int(number), [*frames]]:
                self.stacks[number] = self.shared.stack(frames)
            case ["part", int(number), int(graph), int(index), int(num_parts), [*calls]]:
                called = [(as_int(at), self.sites[site], *self.labels[label]) for at, site, label in calls]
                self.listed.take(number, graph, index, num_parts, called)
            case ["label", int(number), str(action), str(module)]:
                self.labels[number] = (action, module)
            case ["group", str(name), [*ranks], str(axis_name), int(word)]:
                self.groups[name] = GroupProgress(name, self.shared.ranks_of(ranks), 0, axis_name), word
            case ["channel", str(name), str(operation), int(peer_rank), int(word)]:
                self.channels.append((ChannelProgress(name, operation, peer_rank, 0), word))
            case ["error", int(number), str(text)]:
                self.errors[number] = text
            case ["process", str(state)]:
                self.process = state
            case ["clock", float(offset_s), float(error_s)]:
                self.clock = offset_s, error_s
            case ["ring", dict(header)]:
                self.main_thread, self.epoch_ns = as_int(header.get("main_thread")), as_int(header.get("epoch_ns"))
                self.header = checked_header({**header, "dumped_s": 0.0, "reason": RING})

    def dump(
        self,
        data: bytes,
        num_counters: int,
        slots: Slots,
        marked_ns: Mapping[int, MarkedNs],
        progress: Mapping[int, Sequence[int]],
    ) -> Dump:
        """The dump that the slots make with these entries."""
        if self.header is None:
            raise FlightDumpError("read_ring", "has no header")
        counters = layout.COUNTERS_AT // 8
        words = memoryview(data)[: layout.slots_at(num_counters)].cast("Q")

        def counted(word: int) -> int:
            return words[word] if counters <= word < counters + num_counters else 0

        records = self._records(slots, marked_ns)
        alive_s = self._seconds(words[layout.ALIVE_AT // 8]) if words[layout.ALIVE_AT // 8] else 0.0
        replays = self.listed.replays(self._seconds, lambda number: self._device(marked_ns, number), progress)
        last_s = [*records.enqueued_s, *[end_s for end_s in records.completed_s if end_s == end_s]]
        last_s += [max(replay.enqueued_s, replay.completed_s or 0.0) for replay in replays]
        offset_s, error_s = self.clock
        return Dump(
            **{
                **self.header,
                "dumped_s": max([self.header["started_s"], alive_s, *last_s]),
                "clock_offset_s": offset_s,
                "clock_error_s": error_s,
            },
            process=self.process,
            groups=tuple(replace(group, last_sequence=counted(word)) for group, word in self.groups.values()),
            channels=tuple(replace(channel, last_sequence=counted(word)) for channel, word in self.channels),
            records=records,
            replays=replays,
            problems=tuple(dict.fromkeys(self.problems)),
        )

    def _records(self, slots: Slots, marked_ns: Mapping[int, MarkedNs]) -> Records:
        indexes, sites, labels = slots.whole(), slots.sites, slots.labels
        if self.listed:
            for index in indexes:
                if self.listed.has(sites[index]):
                    fields = slots.numbers, labels, slots.sequences, slots.began_ns, slots.ended_ns
                    self.listed.replayed(sites[index], *(values[index] for values in fields))
            indexes = [index for index in indexes if not self.listed.has(sites[index])]
        described = indexes
        if not (self.sites.keys() >= set(sites) and self.labels.keys() >= set(labels)):
            described = [index for index in indexes if sites[index] in self.sites and labels[index] in self.labels]
        if num_torn := slots.num_torn:
            self.problems.append(f"has {num_torn} records that were being written")
        if len(described) < len(indexes):
            self.problems.append(f"has {len(indexes) - len(described)} records of calls that it does not describe")
        device_of = partial(self._device, marked_ns) if marked_ns else None
        return records_of(slots, described, self.sites, self.labels, self.errors, self.epoch_ns, device_of, self.shared)

    def _device(self, marked_ns: Mapping[int, MarkedNs], number: int) -> DeviceTimes | None:
        if number not in marked_ns:
            return None
        return DeviceTimes(*(None if ns is None else self._seconds(ns) for ns in marked_ns[number]))

    def _seconds(self, monotonic_ns: int) -> float:
        return (monotonic_ns + self.epoch_ns) / 1e9
