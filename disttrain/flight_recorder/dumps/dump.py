"""A dump: one rank's records on disk, to be read on another machine, by another version, or when it is cut off.

docs/flight_dump_format.md has the format; `dumps/reading/reader.py` reads it. Torch-free.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgpack

from disttrain.flight_recorder.dumps.private_file import replace_file
from disttrain.flight_recorder.dumps.words import DUMP_VERSION, rank_name
from disttrain.flight_recorder.record.record import (
    BESIDE,
    CallSite,
    ChannelProgress,
    Failure,
    GroupProgress,
    Record,
    Stack,
    ThreadStack,
)
from disttrain.flight_recorder.record.replays import Replay

MAGIC: Final = b"disttrain flight recorder\n"
VERSION: Final = DUMP_VERSION
SUFFIX: Final = ".flight"
RING: Final = "ring"
"""The reason of a dump that its process did not make: it was read from the process's ring."""
_HEADER_FIELDS: Final = (
    *("rank", "world_size", "job", "host", "pid", "started_s", "dumped_s", "reason"),
    *("versions", "package", "libraries", "clock_offset_s", "clock_error_s", "device_is_busy"),
)


@dataclass(frozen=True)
class Dump:
    """The state of one rank at one moment. Times are seconds since the epoch, by its own clock.

    `job` is the same for all ranks of one world. `package` and `libraries` are how file names of disttrain's and of
    installed code begin on that machine. `clock_offset_s` added to its times makes them those of rank 0's clock, give
    or take `clock_error_s`; None when that is not known. `device_is_busy`: whether its GPU had not come to the end of
    what was queued; None where nobody has looked. `records` are oldest first, and so are the `replays` of recorded
    steps, whose operations are not among them. `problems` says what a reader could not use. `process`: of a ring,
    whether the system said that its process was `gone` or `stopped`; empty otherwise.
    """

    rank: int
    world_size: int
    job: str
    host: str
    pid: int
    started_s: float
    dumped_s: float
    reason: str
    versions: dict[str, str]
    package: str
    libraries: tuple[str, ...]
    clock_offset_s: float | None = None
    clock_error_s: float | None = None
    device_is_busy: bool | None = None
    failure: Failure | None = None
    groups: tuple[GroupProgress, ...] = ()
    channels: tuple[ChannelProgress, ...] = ()
    threads: tuple[ThreadStack, ...] = ()
    records: Sequence[Record] = ()
    replays: tuple[Replay, ...] = ()
    problems: tuple[str, ...] = ()
    process: str = ""

    @property
    def main_stack(self) -> Stack:
        """The stack of the main thread; empty when it is not in the dump."""
        return next((thread.stack for thread in self.threads if thread.is_main), ())

    @property
    def is_in_transport(self) -> bool:
        """True when some thread was inside a collective or message, or connecting for its first."""
        inside = f"{self.package}process_group/"
        threads = [
            thread
            for thread in self.threads
            if thread.is_main or not (thread.failure or thread.name.startswith(BESIDE))
        ]
        return any(frame.file.startswith(inside) for thread in threads for frame in thread.stack)


def dump_name(dump: Dump) -> str:
    """The file's name in a folder that several worlds may share."""
    return f"{rank_name(dump.rank, dump.job)}{SUFFIX}"


def write_dump(file: Path, dump: Dump) -> None:
    """Write `file` in one step: readers see the old one or the new one. Only the owner can read it."""
    replace_file(file, encode(dump))


def encode(dump: Dump) -> bytes:
    """The bytes of a dump's file."""
    # One packer for all: making one takes longer than packing a record.
    body = MAGIC + b"".join(map(_packer().pack, _items(dump)))
    return body + packed(["end", zlib.crc32(body)])


def packed(item: Any) -> bytes:
    """Packs an item of a dump as msgpack."""
    return bytes(_packer().pack(item))


def _packer() -> msgpack.Packer:
    # File names may hold bytes that are not UTF-8; Python has them as surrogates.
    return msgpack.Packer(unicode_errors="surrogatepass")


def _items(dump: Dump) -> Iterator[list[Any]]:
    header = {name: getattr(dump, name) for name in _HEADER_FIELDS}
    yield ["dump", {**header, "version": VERSION}]
    tables = _Tables({group.group_name: group.ranks for group in dump.groups})
    for group in dump.groups:
        yield ["group", group.group_name, group.ranks, group.last_sequence, group.axis_name, group.connecting]
    for channel in dump.channels:
        yield ["channel", channel.group_name, channel.operation, channel.peer_rank, channel.last_sequence]
    for thread in dump.threads:
        yield from tables.new_stack(thread.stack)
        yield ["thread", thread.name, thread.is_main, tables.stacks[thread.stack], thread.activity]
    if dump.failure is not None:
        yield from tables.new_stack(dump.failure.stack)
        yield ["failure", dump.failure.kind, dump.failure.message, tables.stacks[dump.failure.stack]]
    yield from _replays(dump, tables)
    for record in reversed(dump.records):
        label = (record.action, record.module)
        if not tables.has_met(record.site) or label not in tables.labels:
            yield from tables.new_call(record.site, label)
        times_s = (record.enqueued_s, record.completed_s)
        called = tables.number_of(record.site), record.sequence
        fields = *called, record.state.value, *times_s, record.error, tables.labels[label]
        yield ["record", *fields, record.device, record.waits_s]


def _replays(dump: Dump, tables: _Tables) -> Iterator[list[Any]]:
    graphs: dict[int, int] = {}
    for replay in reversed(dump.replays):
        graph = replay.graph
        if graph.number not in graphs:
            graphs[graph.number] = len(graphs)
            for call in graph.calls:
                yield from tables.new_call(call.site, (call.action, call.module))
            number_of, labels = tables.number_of, tables.labels
            numbered = [(number_of(call.site), labels[call.action, call.module], call.part) for call in graph.calls]
            yield ["graph", graph.number, numbered]
        times_s = (replay.enqueued_s, replay.completed_s)
        yield ["replay", graphs[graph.number], replay.number, replay.before, *times_s, replay.device, replay.not_come]


class _Tables:
    """The numbers of what a dump says once. Its methods yield the arrays of what is new."""

    def __init__(self, ranks_of: dict[str, tuple[int, ...]]) -> None:
        self.stacks: dict[Stack, int] = {}
        self._sites: dict[CallSite, int] = {}
        # By address, with what has it: to hash a site goes through all ranks of its group.
        self._met: dict[int, tuple[int, CallSite]] = {}
        self.labels: dict[tuple[str, str], int] = {}
        self._ranks_of = ranks_of

    def new_stack(self, stack: Stack) -> Iterator[list[Any]]:
        if stack not in self.stacks:
            self.stacks[stack] = len(self.stacks)
            yield ["stack", stack]

    def has_met(self, site: CallSite) -> bool:
        """True if this object has been given to `new_call`."""
        return id(site) in self._met

    def number_of(self, site: CallSite) -> int:
        """The number of a site that has been given to `new_call`."""
        return self._met[id(site)][0]

    def new_call(self, site: CallSite, label: tuple[str, str]) -> Iterator[list[Any]]:
        if id(site) not in self._met:
            if site not in self._sites:
                yield from self.new_stack(site.stack)
                self._sites[site] = len(self._sites)
                shapes = (site.input_shapes, site.output_shapes)
                ranks = None if site.ranks == self._ranks_of.get(site.group_name) else site.ranks
                called = (site.group_name, ranks, site.operation, *shapes, site.dtypes, site.peer_rank)
                yield ["site", *called, self.stacks[site.stack], site.reduction, site.splits or None]
            self._met[id(site)] = self._sites[site], site
        if label not in self.labels:
            self.labels[label] = len(self.labels)
            yield ["label", *label]
