"""Converts torch's own flight recorder dumps (`nccl_trace_rank_7`, pickled or as JSON, format version 2).

They lack roots, what a rank does outside its collectives, and the time of the dump (the file's time is used). Messages
are numbered per pair, so those of a rank whose ring has lost its first records cannot be matched with their other ends,
and are left out. Fields: torch/csrc/distributed/c10d/FlightRecorder.hpp. Torch-free.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from disttrain._python.pickles import parse_plain
from disttrain.errors import FlightDumpError
from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.dumps.reading.checked_values import MAX_WORLD_SIZE
from disttrain.flight_recorder.dumps.reading.reader import MAX_FILE_BYTES
from disttrain.flight_recorder.record.record import (
    RECEIVE,
    SEND,
    CallSite,
    ChannelProgress,
    DeviceTimes,
    Frame,
    GroupProgress,
    Record,
    Stack,
    State,
    ranks_text,
)

JOB: Final = "torch"
_OPERATION: Final = "read_torch_dump"
_RANK: Final = re.compile(r"rank_?(\d{1,7})(?:\.[a-z]+)?$")
_MAJOR: Final = "2"
_WRONG: Final = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
_NAMES: Final = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
}
_PEERS: Final = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)$")
_INSTALLED: Final = re.compile(r"(.*?/(?:site-packages|dist-packages)/)")


@dataclass(frozen=True)
class TorchDump:
    """A file's content: `content` is what torch wrote, checked no further than that it is a dump."""

    file: str
    rank: int
    content: dict[str, Any]
    written_s: float

    def members(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The description and the ranks of each group, by torch's name."""
        result = {}
        for name, config in self.content.get("pg_config", {}).items():
            ranks = config["ranks"]
            ranks = json.loads(ranks) if isinstance(ranks, str) else ranks
            result[str(name)] = (str(config.get("desc", "")), tuple(int(rank) for rank in ranks))
        return result


def may_be_torch_dump(file: Path) -> bool:
    """True if the file's name, which has the rank, and its first byte are those of a dump of torch's."""
    if not _RANK.search(file.name) or file.name.startswith("."):
        return False
    try:
        with file.open("rb") as stream:
            return stream.read(1) in (b"\x80", b"{")
    except OSError:
        return False


def read_torch_dump(file: Path) -> TorchDump:
    """Raises FlightDumpError when it is none, is damaged, or of a version that is not known."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise FlightDumpError(_OPERATION, f"{file.name} has more than {MAX_FILE_BYTES >> 20} MiB.")
        data, written_s = file.read_bytes(), file.stat().st_mtime
    except OSError as error:
        raise FlightDumpError(_OPERATION, f"{file.name} cannot be read ({error.strerror}).") from None
    named = _RANK.search(file.name)
    try:
        content = json.loads(data) if data.startswith(b"{") else parse_plain(data)
    except RecursionError:
        raise FlightDumpError(_OPERATION, f"{file.name} is nested too deeply.") from None
    except ValueError as error:
        problem = str(error) if data.startswith(b"\x80") else "is damaged"
        raise FlightDumpError(_OPERATION, f"{file.name} {problem}.") from None
    if named is None or not isinstance(content, dict) or not isinstance(content.get("pg_config"), dict):
        raise FlightDumpError(_OPERATION, f"{file.name} is not a dump of torch's flight recorder.")
    version = str(content.get("version"))
    if version.partition(".")[0] != _MAJOR:
        raise FlightDumpError(_OPERATION, f"{file.name} has torch's format version {version}; known is {_MAJOR}.")
    return TorchDump(file.name, int(named[1]), content, written_s)


def as_dumps(torch_dumps: Sequence[TorchDump], notes: list[str]) -> list[Dump]:
    """Dumps of ours. What cannot be used of them is said in `notes`."""
    apart = _names_of_several_groups(torch_dumps)
    dumps = []
    for torch_dump in torch_dumps:
        try:
            dumps.append(_Converter(torch_dump, apart).dump())
        except _WRONG as error:
            notes.append(f"not used: {torch_dump.file} has fields that cannot be ({type(error).__name__})")
    # Only all of them together know how many ranks there are.
    world_size = max((dump.world_size for dump in dumps), default=0)
    return [Dump(**{**vars(dump), "world_size": world_size}) for dump in dumps]


def _names_of_several_groups(torch_dumps: Sequence[TorchDump]) -> set[str]:
    """Names that different ranks have given to groups without a common member."""
    members_of: dict[str, set[tuple[int, ...]]] = {}
    for torch_dump in torch_dumps:
        try:
            for name, (_, ranks) in torch_dump.members().items():
                members_of.setdefault(name, set()).add(ranks)
        except _WRONG:
            continue  # Said when it is converted.
    return {
        name
        for name, ways in members_of.items()
        if any(not set(ranks) & set(others) for ranks in ways for others in ways if ranks != others)
    }


class _Converter:
    """One dump. Raises ValueError, TypeError, LookupError or AttributeError for fields that cannot be."""

    def __init__(self, torch_dump: TorchDump, apart: set[str]) -> None:
        self._from = torch_dump
        self._apart = apart
        self._members = torch_dump.members()
        self._sites: dict[CallSite, CallSite] = {}
        self._last: Counter[str] = Counter()
        self._num_messages: Counter[tuple[str, str, int]] = Counter()
        self._libraries: set[str] = set()
        self._problems: list[str] = []

    def dump(self) -> Dump:
        torch_dump = self._from
        records = tuple(self._records())
        sizes = [max(ranks, default=-1) + 1 for _, ranks in self._members.values()]
        world_size = max([torch_dump.rank + 1, *sizes])
        if world_size > MAX_WORLD_SIZE:
            raise ValueError("too many ranks")
        last_s = max((max(record.enqueued_s, record.completed_s or 0.0) for record in records), default=0.0)
        groups = [(self._title(name), ranks) for name, (_, ranks) in self._members.items()]
        named = {record.site.group_name: record.site.ranks for record in records} | dict(groups)
        return Dump(
            rank=torch_dump.rank,
            world_size=world_size,
            job=JOB,
            host="",
            pid=0,
            started_s=min((record.enqueued_s for record in records), default=torch_dump.written_s),
            dumped_s=max(torch_dump.written_s, last_s),
            reason="torch's flight recorder",
            versions={"format": f"torch {torch_dump.content['version']}"},
            package="\0",
            libraries=tuple(sorted(self._libraries)) or ("\0",),
            groups=tuple(GroupProgress(title, ranks, self._last[title]) for title, ranks in named.items()),
            channels=tuple(ChannelProgress(*key, number) for key, number in self._num_messages.items()),
            records=records,
            problems=tuple(self._problems),
        )

    def _records(self) -> Iterator[Record]:
        entries = sorted(self._from.content.get("entries") or [], key=lambda entry: int(entry["record_id"]))
        if not entries:
            return
        states = _states_of_coalesced(entries)
        lost_messages = int(entries[0]["record_id"]) > 0 and any(entry.get("is_p2p") for entry in entries)
        if lost_messages:
            self._problems.append("has lost its first records: its messages are left out")
        for index, entry in enumerate(entries):
            operation = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
            if operation == "coalesced" or (lost_messages and entry.get("is_p2p")):
                continue
            yield self._record(entry, operation, states.get(index, str(entry["state"])))

    def _record(self, entry: dict[str, Any], operation: str, state: str) -> Record:
        name = str(entry["process_group"][0])
        _, ranks = self._members.get(name) or self._only_group()
        title = self._title(name)
        peer_rank = None
        if message := _PEERS.match(operation):
            operation = SEND if message[1] == "send" else RECEIVE
            peer_rank = ranks[int(message[3])]
            self._num_messages[title, operation, peer_rank] += 1
            sequence = self._num_messages[title, operation, peer_rank]
        else:
            sequence = int(entry["collective_seq_id"])
            self._last[title] = max(self._last[title], sequence)
        dtypes = tuple(
            dict.fromkeys(str(dtype) for dtype in entry.get("input_dtypes") or entry.get("output_dtypes") or ())
        )
        site = CallSite(
            group_name=title,
            ranks=ranks,
            operation=_NAMES.get(operation, operation),
            input_shapes=_shapes(entry.get("input_sizes")),
            output_shapes=_shapes(entry.get("output_sizes")),
            dtypes=dtypes,
            peer_rank=peer_rank,
            stack=self._stack(entry.get("frames") or ()),
        )
        created_s = int(entry["time_created_ns"]) / 1e9
        began_s = int(entry.get("time_discovered_started_ns") or 0) / 1e9 or created_s
        ended_s = int(entry.get("time_discovered_completed_ns") or 0) / 1e9
        is_over = state == "completed" or bool(entry.get("retired"))
        has_device = str(entry["profiling_name"]).startswith("nccl:")
        return Record(
            self._sites.setdefault(site, site),
            sequence,
            State.COMPLETED if is_over else State.ENQUEUED,
            began_s if is_over else created_s,
            (ended_s or began_s) if is_over else None,
            device=None if is_over or not has_device else DeviceTimes(began_s if state == "started" else None),
        )

    def _only_group(self) -> tuple[str, tuple[int, ...]]:
        if len(self._members) != 1:
            raise LookupError("an entry of a group that is not described")
        return next(iter(self._members.values()))

    def _title(self, name: str) -> str:
        description, ranks = self._members.get(name) or self._only_group()
        if description == "default_pg" or len(self._members) == 1:
            return "world"
        title = f"{name}:{description}" if description not in ("", "undefined") else name
        return f"{title} of {ranks_text(ranks)}" if name in self._apart else title

    def _stack(self, frames: Sequence[dict[str, Any]]) -> Stack:
        stack = tuple(Frame(str(frame["filename"]), int(frame["line"]), str(frame["name"])) for frame in frames)
        for frame in stack:
            if installed := _INSTALLED.match(frame.file):
                self._libraries.add(installed[1])
        return stack


def _shapes(sizes: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(extent) for extent in shape) for shape in sizes or ())


def _states_of_coalesced(entries: Sequence[dict[str, Any]]) -> dict[int, str]:
    """The states of operations that were issued together, by place: the entry `coalesced` after them has theirs."""
    states: dict[int, str] = {}
    open_since: dict[tuple[str, int, int], list[int]] = {}
    for index, entry in enumerate(entries):
        key = (str(entry["process_group"][0]), int(entry["collective_seq_id"]), int(entry.get("p2p_seq_id") or 0))
        if str(entry["profiling_name"]).endswith(":coalesced"):
            for earlier in open_since.pop(key, []):
                states[earlier] = str(entry["state"])
        else:
            open_since.setdefault(key, []).append(index)
    return states
