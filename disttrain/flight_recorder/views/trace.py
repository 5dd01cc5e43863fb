"""Writes all ranks' calls in Chrome's trace format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each rank is a process, each of its groups a track, with more tracks where calls of a group overlap; an arrow goes from
each send to its receive. Clocks are aligned as far as the ranks know how theirs differ. Torch-free.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from disttrain.flight_recorder.analysis.alignment.messages import MessageKey, message_key
from disttrain.flight_recorder.analysis.wording import location
from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.dumps.private_file import private_file
from disttrain.flight_recorder.record.record import SEND, CallSite, Record, State
from disttrain.flight_recorder.views.data import first_s, shift_s, span_s
from disttrain.flight_recorder.views.words import purpose

_MAX_LANES: Final = 16
_FEWEST_US: Final = 0.001


def write_trace(file: Path, dumps: Sequence[Dump]) -> None:
    """Write `file` in one step, for its owner's eyes only. Raises FlightDumpError when that cannot be."""
    with private_file(file) as stream:
        stream.write('{"displayTimeUnit":"ms","traceEvents":[')
        between, encode = "\n", json.JSONEncoder(separators=(",", ":")).encode
        for event in trace_events(dumps):
            stream.write(between + encode(event))
            between = ",\n"
        stream.write("\n]}\n")


def trace_events(dumps: Sequence[Dump]) -> Iterator[dict[str, Any]]:
    """The events of the trace. Times are in microseconds since the first call of all."""
    start_s = first_s(dumps)
    messages: dict[MessageKey, int] = {}
    for dump in dumps:
        yield {"ph": "M", "name": "process_name", "pid": dump.rank, "args": {"name": f"rank {dump.rank}"}}
        yield {"ph": "M", "name": "process_labels", "pid": dump.rank, "args": {"labels": f"{dump.host}:{dump.pid}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": dump.rank, "args": {"sort_index": dump.rank}}
        axis_names = {group.group_name: group.axis_name for group in dump.groups}
        tracks, sites = Tracks(), _SiteTexts(dump)
        for record in dump.records:
            begun_s, lasted_s = span_s(dump, record)
            begun_us = (begun_s + shift_s(dump) - start_s) * 1e6
            lasted_us = max(lasted_s * 1e6, _FEWEST_US)
            track, is_new = tracks.track(record.site.group_name, begun_us, begun_us + lasted_us)
            at = {"pid": dump.rank, "tid": track}
            if is_new:
                name = _track_name(record.site.group_name, axis_names, track % _MAX_LANES)
                yield {"ph": "M", "name": "thread_name", **at, "args": {"name": name}}
            yield {"ph": "X", "ts": begun_us, "dur": lasted_us, **at, **_shown(sites, record)}
            if record.site.is_message:
                number = messages.setdefault(message_key(dump.rank, record), len(messages))
                arrow = {"name": "message", "cat": "message", "id": number, **at}
                if record.site.operation == SEND:
                    yield {**arrow, "ph": "s", "ts": begun_us}
                else:
                    yield {**arrow, "ph": "f", "bp": "e", "ts": begun_us + lasted_us * 0.999}


@dataclass
class Tracks:
    """The tracks of one rank: within one, nothing overlaps, which viewers would draw wrongly."""

    groups: dict[str, tuple[int, list[float]]] = field(default_factory=dict)
    """Of each group, its first track, and until when each of its tracks is taken."""

    def track(self, group_name: str, begun_us: float, ended_us: float) -> tuple[int, bool]:
        """The track of a call, and whether the call is the first there."""
        if group_name not in self.groups:
            self.groups[group_name] = (_MAX_LANES * len(self.groups), [])
        first, ends_us = self.groups[group_name]
        for lane, end_us in enumerate(ends_us):
            if end_us <= begun_us:
                ends_us[lane] = ended_us
                return first + lane, False
        if len(ends_us) < _MAX_LANES:
            ends_us.append(ended_us)
            return first + len(ends_us) - 1, True
        return first + _MAX_LANES - 1, False


def _track_name(group_name: str, axis_names: dict[str, str], lane: int) -> str:
    axis_name = axis_names.get(group_name)
    name = f"{group_name} ({axis_name})" if axis_name else group_name
    return f"{name}, at the same time {lane + 1}" if lane else name


@dataclass
class _SiteTexts:
    """Texts about the call sites of `dump`, made once for all calls of a site."""

    dump: Dump
    texts: dict[int, tuple[str, str]] = field(default_factory=dict)

    def of(self, site: CallSite) -> tuple[str, str]:
        """The tensors and the line of a call site."""
        # By identity: the dump holds it, and a hash goes through all that it holds.
        texts = self.texts.get(id(site))
        if texts is None:
            texts = self.texts[id(site)] = site.tensors, location(self.dump, site.stack)
        return texts


def _on_device(record: Record) -> str | None:
    """The progress of a GPU with it; None where that is not known."""
    if record.device is None:
        return None
    came_s, left_s, _ = record.device
    if came_s is None:
        return "has not come to it"
    return "has come to it" if left_s is None else f"has left it after {(left_s - came_s) * 1e3:.3f} ms"


def _shown(sites: _SiteTexts, record: Record) -> dict[str, Any]:
    site = record.site
    tensors, line = sites.of(site)
    texts: dict[str, Any] = {
        "sequence": record.sequence,
        "tensors": tensors,
        "state": record.state.value,
        "device": _on_device(record),
        "for": purpose(record),
        "at": line,
        "error": record.error,
        "peer": site.peer_rank,
    }
    shown: dict[str, Any] = {
        "name": f"{site.operation} #{record.sequence}",
        "cat": site.operation,
        "args": {name: value for name, value in texts.items() if value not in (None, "")},
    }
    # Names of colours that viewers know.
    colour = {State.ENQUEUED: "bad", State.FAILED: "terrible"}.get(record.state)
    return shown | ({"cname": colour} if colour else {})
