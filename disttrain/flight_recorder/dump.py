"""A dump: one rank's ring on disk, so that it can be read on another machine, by another version, when it is cut off.

The file is `MAGIC`, then msgpack arrays, one after the other, each starting with what it is:

    ["dump", header]                                  a map; first; its "version" rises when readers must change
    ["stack", [[file, line, function], ...]]          innermost frame first; counted from 0 as they come
    ["group", name, ranks, last_sequence]
    ["channel", group_name, operation, peer_rank, last_sequence]
    ["thread", name, is_main, stack]                  `stack` is the number of a stack that came before
    ["failure", kind, message, stack]                 when an exception ends the process
    ["site", group_name, ranks, operation, input_shapes, output_shapes, dtypes, peer_rank, stack]
    ["record", site, sequence, state, enqueued_s, completed_s, error]     newest first: a cut costs the oldest
    ["end", crc32]                                    of everything before it

Readers skip arrays of a kind that they don't know. Torch-free.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import msgpack

from disttrain.errors import FlightDumpError
from disttrain.flight_recorder.record import (
    CallSite,
    ChannelProgress,
    Failure,
    Frame,
    GroupProgress,
    Record,
    Stack,
    State,
    ThreadStack,
)

MAGIC: Final = b"disttrain flight recorder\n"
VERSION: Final = 1
SUFFIX: Final = ".flight"
MAX_FILE_BYTES: Final = 256 << 20
MAX_WORLD_SIZE: Final = 1 << 20
_HEADER_FIELDS: Final = (
    *("rank", "world_size", "job", "host", "pid", "started_s", "dumped_s", "reason"),
    *("versions", "package", "libraries"),
)
_KINDS: Final = {"dump", "stack", "group", "channel", "thread", "failure", "site", "record", "end"}
_STATES: Final = {state.value: state for state in State}

T = TypeVar("T")


@dataclass(frozen=True)
class Dump:
    """What one rank knew at one moment. Times are seconds since the epoch, by its own clock.

    `job` is the same for all ranks of one world. `package` and `libraries` are how file names of disttrain's and of
    installed code begin on that machine. `records` are oldest first. `problems` says what a reader could not use.
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
    failure: Failure | None = None
    groups: tuple[GroupProgress, ...] = ()
    channels: tuple[ChannelProgress, ...] = ()
    threads: tuple[ThreadStack, ...] = ()
    records: tuple[Record, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def main_stack(self) -> Stack:
        """Of the main thread; empty when it is not in the dump."""
        return next((thread.stack for thread in self.threads if thread.is_main), ())

    @property
    def is_in_transport(self) -> bool:
        """True when some thread was inside a collective or message, or connecting for its first."""
        inside = f"{self.package}process_group/"
        return any(frame.file.startswith(inside) for thread in self.threads for frame in thread.stack)


def dump_name(dump: Dump) -> str:
    """The file's name in a folder that several worlds may share."""
    return f"rank-{dump.rank:05d}.{dump.job}{SUFFIX}"


def write_dump(file: Path, dump: Dump) -> None:
    """Write `file` in one step: readers see the old one or the new one. Only the owner can read it."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(encode(dump))
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def encode(dump: Dump) -> bytes:
    """The bytes of a dump's file."""
    body = MAGIC + b"".join(map(_packed, _items(dump)))
    return body + _packed(["end", zlib.crc32(body)])


def _packed(item: list[Any]) -> bytes:
    # File names may hold bytes that are not UTF-8; Python has them as surrogates.
    return bytes(msgpack.packb(item, unicode_errors="surrogatepass"))


def _items(dump: Dump) -> Iterator[list[Any]]:
    header = {name: getattr(dump, name) for name in _HEADER_FIELDS}
    yield ["dump", {**header, "version": VERSION}]
    stacks: dict[Stack, int] = {}

    def new_stack(stack: Stack) -> Iterator[list[Any]]:
        if stack not in stacks:
            stacks[stack] = len(stacks)
            yield ["stack", stack]

    for group in dump.groups:
        yield ["group", group.group_name, group.ranks, group.last_sequence]
    for channel in dump.channels:
        yield ["channel", channel.group_name, channel.operation, channel.peer_rank, channel.last_sequence]
    for thread in dump.threads:
        yield from new_stack(thread.stack)
        yield ["thread", thread.name, thread.is_main, stacks[thread.stack]]
    if dump.failure is not None:
        yield from new_stack(dump.failure.stack)
        yield ["failure", dump.failure.kind, dump.failure.message, stacks[dump.failure.stack]]
    sites: dict[CallSite, int] = {}
    for record in reversed(dump.records):
        site = record.site
        if site not in sites:
            yield from new_stack(site.stack)
            sites[site] = len(sites)
            shapes = (site.input_shapes, site.output_shapes)
            called = (site.group_name, site.ranks, site.operation, *shapes, site.dtypes, site.peer_rank)
            yield ["site", *called, stacks[site.stack]]
        times_s = (record.enqueued_s, record.completed_s)
        yield ["record", sites[site], record.sequence, record.state.value, *times_s, record.error]


def read_dump(file: Path) -> Dump:
    """The dump in `file`; what is missing or damaged is said in its `problems`.

    Raises FlightDumpError when nothing of it can be used: not a dump, a newer version, no header, unreadable.
    """
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise _unusable(file, f"has more than {MAX_FILE_BYTES >> 20} MiB")
        data = file.read_bytes()
    except OSError as error:
        raise _unusable(file, f"cannot be read ({error.strerror})") from None
    try:
        return decode(data)
    except FlightDumpError as error:
        raise _unusable(file, error.problem) from None


def decode(data: bytes) -> Dump:
    """The inverse of `encode`, as far as `data` goes. Raises FlightDumpError when nothing can be used."""
    if not data.startswith(MAGIC):
        raise FlightDumpError("read_dump", "is not a dump of disttrain's flight recorder")
    reader = _Reader()
    end = len(MAGIC)
    unpacker = msgpack.Unpacker(max_buffer_size=len(data), strict_map_key=False, unicode_errors="surrogatepass")
    unpacker.feed(memoryview(data)[len(MAGIC) :])
    try:
        for item in unpacker:
            match item:
                case ["end", checksum]:
                    is_whole = checksum == zlib.crc32(memoryview(data)[:end])
                    return reader.finished(None if is_whole else "is damaged: what it says may be wrong")
            reader.take(item)
            end = len(MAGIC) + unpacker.tell()
    except (ValueError, TypeError, LookupError, OverflowError, msgpack.exceptions.StackError) as error:
        return reader.finished(f"is damaged after {end} bytes ({type(error).__name__})")
    return reader.finished(f"is cut off after {end} bytes")


def _unusable(file: Path, problem: str) -> FlightDumpError:
    return FlightDumpError("read_dump", f"{file.name} {problem}.")


@dataclass
class _Reader:
    """Takes a dump's arrays one after the other. Raises ValueError, TypeError or LookupError for one that cannot be."""

    header: dict[str, Any] | None = None
    failure: Failure | None = None
    stacks: list[Stack] = field(default_factory=list)
    sites: list[CallSite] = field(default_factory=list)
    groups: list[GroupProgress] = field(default_factory=list)
    channels: list[ChannelProgress] = field(default_factory=list)
    threads: list[ThreadStack] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def take(self, item: Any) -> None:
        """Add what `item` says."""
        match item:
            case ["record", int(site), int(sequence), str(state), float(began_s), float() | None as ended_s, error]:
                site_here, state_here = _at(self.sites, site), _STATES[state]
                self.records.append(Record(site_here, sequence, state_here, began_s, ended_s, _text_or_none(error)))
            case ["site", str(name), [*ranks], str(operation), [*inputs], [*outputs], [*dtypes], peer_rank, stack]:
                shapes = tuple(map(_ints, inputs)), tuple(map(_ints, outputs))
                peer = None if peer_rank is None else _int(peer_rank)
                called = (name, _ints(ranks), operation, *shapes, tuple(map(_text, dtypes)), peer)
                self.sites.append(CallSite(*called, _at(self.stacks, stack)))
            case ["stack", [*frames]]:
                self.stacks.append(tuple(Frame(_text(file), _int(line), _text(name)) for file, line, name in frames))
            case ["group", str(name), [*ranks], int(last_sequence)]:
                self.groups.append(GroupProgress(name, _ints(ranks), last_sequence))
            case ["channel", str(name), str(operation), int(peer_rank), int(last_sequence)]:
                self.channels.append(ChannelProgress(name, operation, peer_rank, last_sequence))
            case ["thread", str(name), bool(is_main), int(stack)]:
                self.threads.append(ThreadStack(name, is_main, _at(self.stacks, stack)))
            case ["failure", str(kind), str(message), int(stack)]:
                self.failure = Failure(kind, message, _at(self.stacks, stack))
            case ["dump", dict(header)] if self.header is None:
                self.header = _checked_header(header)
            case [str(kind), *_] if kind not in _KINDS:
                return
            case _:
                raise ValueError("an array that no dump has")

    def finished(self, problem: str | None) -> Dump:
        """The dump, as far as it came. Raises FlightDumpError without a header."""
        if self.header is None:
            raise FlightDumpError("read_dump", problem or "has no header")
        return Dump(
            **self.header,
            failure=self.failure,
            groups=tuple(self.groups),
            channels=tuple(self.channels),
            threads=tuple(self.threads),
            records=tuple(reversed(self.records)),
            problems=() if problem is None else (problem,),
        )


def _checked_header(header: dict[Any, Any]) -> dict[str, Any]:
    """The header's fields for `Dump`. Raises FlightDumpError for a version that this reader does not know."""
    version = _int(header.get("version"))
    if version > VERSION:
        raise FlightDumpError("read_dump", f"has format version {version}; this disttrain-flight knows up to {VERSION}")
    rank, world_size = _int(header.get("rank")), _int(header.get("world_size"))
    if not 0 <= rank < world_size <= MAX_WORLD_SIZE:
        raise ValueError("a rank outside its world")
    versions, libraries = header.get("versions"), header.get("libraries")
    if not isinstance(versions, dict) or not isinstance(libraries, list):
        raise TypeError("versions or libraries of another type")
    return {
        "rank": rank,
        "world_size": world_size,
        "pid": _int(header.get("pid")),
        **{name: _text(header.get(name)) for name in ("job", "host", "reason", "package")},
        **{name: _finite(header.get(name)) for name in ("started_s", "dumped_s")},
        "versions": {_text(name): _text(version) for name, version in versions.items()},
        "libraries": tuple(map(_text, libraries)),
    }


def _at(known: list[T], place: Any) -> T:
    if not 0 <= _int(place) < len(known):
        raise IndexError("a number of something that did not come before")
    return known[_int(place)]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)


def _int(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("not a whole number")
    return value


def _ints(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(_int, values))


def _finite(value: Any) -> float:
    if not isinstance(value, float) or not math.isfinite(value):
        raise ValueError("not a finite number")
    return value
