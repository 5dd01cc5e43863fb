"""Puts what torch's profilers have written on several ranks into one trace for Perfetto: a process for each rank.

Each rank makes its own part, compressed, by the common clock; whoever merges only puts parts one behind the other. In a
rank's process come its threads, then a track for the communication under way along each mesh axis, as the flight
recorder has seen it, then the streams of its GPU.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from disttrain.flight_recorder.live.step_tally import Ended
from disttrain.flight_recorder.views.trace import Tracks
from disttrain.profiling.rank_trace import ON_DEVICE, STEP, Event, Launches

_KINDS: Final = {"X", "s", "t", "f", "C"}
"""Events with a duration, arrows, counters. torch writes marks of its own beside these."""
_WITH_AXIS: Final = {*ON_DEVICE, "gpu_user_annotation"}
_FIRST_UNDER_WAY: Final = 1 << 16
"""The number of the first track of communication: behind all threads, before all streams."""
_FIRST_STREAM: Final = 1 << 20
_HEAD: Final = b'{"displayTimeUnit":"ms","traceEvents":[\n{"ph":"M","name":"disttrain","pid":0,"args":{}}'
_FOOT: Final = b"\n]}\n"


def part_of_rank(
    trace: Mapping[str, Any],
    rank: int,
    label: str,
    start_ns: int,
    shift_ns: int,
    under_way: Sequence[Ended],
    axis_names: Mapping[str, str],
) -> bytes:
    """A rank's part, compressed: events in microseconds since `start_ns` by the common clock.

    `label`: its host and process; `shift_ns`: what is to be added to its clock; `under_way`: by Unix time;
    `axis_names`: of each group by its name.
    """
    events = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "process_labels", "pid": rank, "args": {"labels": label}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
        *_of_torch(trace, rank, (int(trace.get("baseTimeNanoseconds", 0)) + shift_ns - start_ns) / 1e3, axis_names),
        *_under_way(under_way, rank, shift_ns - start_ns),
    ]
    encode = json.JSONEncoder(separators=(",", ":")).encode
    return gzip.compress("".join(f",\n{encode(event)}" for event in events).encode(), compresslevel=4)


def write_merged(file: Path, parts: Sequence[bytes]) -> None:
    """Write `file` in one step, compressed if its name ends in .gz. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.part")
    with temporary.open("wb") as stream:
        for part in (gzip.compress(_HEAD), *parts, gzip.compress(_FOOT)):
            # Members of a file that gzip has compressed may stand one behind the other (RFC 1952).
            stream.write(part if file.suffix == ".gz" else gzip.decompress(part))
    temporary.replace(file)


def _of_torch(trace: Mapping[str, Any], rank: int, shift_us: float, axis_names: Mapping[str, str]) -> Iterator[Event]:
    events = trace["traceEvents"]
    launches = Launches([event for event in events if event.get("ph") == "X"], axis_names)
    names = {
        (event["pid"], event["tid"]): str(event["args"]["name"]).strip()
        for event in events
        if event.get("ph") == "M" and event["name"] == "thread_name"
    }
    main = next((_track(event) for event in events if STEP.fullmatch(str(event.get("name", "")))), None)
    tracks: dict[tuple[Any, Any], int] = {} if main is None else {main: 0}
    if main is not None:
        yield from _named(rank, 0, "main thread")
    for event in events:
        # torch's own rows, about the profiler itself, are of a process without a number.
        if event.get("ph") not in _KINDS or "ts" not in event or not isinstance(event.get("pid"), int):
            continue
        track = _track(event)
        if track not in tracks:
            is_stream = "stream" in names.get(track, "")
            tracks[track] = number = len(tracks) + (_FIRST_STREAM if is_stream else 1)
            device = f"GPU {track[0]} " if is_stream else ""
            yield from _named(rank, number, f"{device}{names.get(track, f'thread {track[1]}')}")
        moved = {**event, "pid": rank, "tid": tracks[track], "ts": round(event["ts"] + shift_us, 3)}
        if "id" in event:
            moved["id"] = rank << 40 | int(event["id"])  # arrows of two ranks must not meet
        if event.get("cat") in _WITH_AXIS and (axis := launches.axis_of(event)) is not None:
            # torch's ranges on a GPU, and NCCL's kernels, say nothing of it.
            moved["name"] = f"{event['name'].partition('(')[0].strip()} [{axis}]"
        yield moved


def _under_way(calls: Sequence[Ended], rank: int, shift_ns: int) -> Iterator[Event]:
    tracks = Tracks()
    for call in calls:
        axis = call.axis_name or call.group_name
        began_us, ended_us = ((time_ns + shift_ns) / 1e3 for time_ns in (call.began_ns, call.ended_ns))
        number, is_new = tracks.track(axis, began_us, ended_us)
        if is_new:
            yield from _named(rank, _FIRST_UNDER_WAY + number, f"communication {axis}")
        yield {
            "ph": "X",
            "name": f"{call.operation} [{axis}]",
            "cat": "communication",
            "pid": rank,
            "tid": _FIRST_UNDER_WAY + number,
            "ts": round(began_us, 3),
            "dur": round(ended_us - began_us, 3),
            "args": {"waited_us": round((call.ended_ns - call.waits_ns) / 1e3, 3)},
        }


def _track(event: Event) -> tuple[Any, Any]:
    return event.get("pid"), event.get("tid")


def _named(rank: int, number: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": number, "args": {"sort_index": number}}
