"""Reads what torch's profiler has written of one rank: its steps, what computed, and what was waited for.

Events are those of Chrome's trace format; times are microseconds since `baseTimeNanoseconds`, which is Unix time.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from disttrain.process_group.watching.ranges import WAIT, parsed

Event = dict[str, Any]
Span = tuple[int, int]

LOADERS: Final = ("enumerate(DataLoader)", "data wait")
"""Beginnings of ranges that wait for data: of torch's DataLoader, and of those that a script names so itself."""

STEP: Final = re.compile(r"ProfilerStep#(\d+)")
"""The range of a step, under torch's name for it."""
OF_NCCL: Final = "nccl:"
"""The name that torch's own ranges around NCCL's kernels begin with."""
ON_DEVICE: Final = {"kernel", "gpu_memcpy", "gpu_memset"}
_BETWEEN_DEVICES: Final = ("PtoP", "Peer")


@dataclass(frozen=True)
class RankTrace:
    """One rank's part: spans in nanoseconds of Unix time. `window` spans the steps; None where there is nothing."""

    window: Span | None
    on_device: bool
    computing: list[Span]
    communication: dict[str, list[Span]]
    data_waits: list[Span]


def read_rank_trace(
    trace: Mapping[str, Any], steps: Collection[int], axis_names: Mapping[str, str], alone: Collection[str] = ()
) -> RankTrace:
    """Reads what `trace` says of these `steps`, by torch's numbers; of all that is there where none is given.

    `communication` has kernels by mesh axis on a device, and the waits of the host without one. `axis_names`: of each
    group by its name; `alone`: axes of one rank, on which nobody is waited for.
    """
    base_ns = int(trace.get("baseTimeNanoseconds", 0))
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "ts" in event]
    on_device = any(event.get("cat") in ON_DEVICE for event in events)
    window = _window(events, steps, base_ns)
    data_waits = [_span(event, base_ns) for event in _annotations(events) if event["name"].startswith(LOADERS)]
    communication: defaultdict[str, list[Span]] = defaultdict(list)
    computing: list[Span] = []
    if on_device:
        launches = Launches(events, axis_names)
        for event in events:
            if event.get("cat") in ON_DEVICE:
                axis = launches.axis_of(event)
                (computing if axis is None else communication[axis]).append(_span(event, base_ns))
        if window is not None:
            # The host has left its last step before the device has.
            ends = [ended for spans in (computing, *communication.values()) for _, ended in spans]
            window = window[0], max(window[1], *ends)
    else:
        operators = (event for event in events if event.get("cat") == "cpu_op")
        computing = [_span(event, base_ns) for event in operators if not event["name"].startswith("profiler::")]
        for event in _annotations(events):
            kind, axis = parsed(event["name"]) or ("", "")
            if kind == WAIT and axis not in alone:
                communication[axis].append(_span(event, base_ns))
    return RankTrace(window, on_device, computing, dict(communication), data_waits)


def _annotations(events: Sequence[Event]) -> Iterator[Event]:
    return (event for event in events if event.get("cat") == "user_annotation")


def _span(event: Event, base_ns: int) -> Span:
    began_ns = base_ns + round(event["ts"] * 1e3)
    return began_ns, began_ns + round(event.get("dur", 0) * 1e3)


def _window(events: Sequence[Event], steps: Collection[int], base_ns: int) -> Span | None:
    named = [(STEP.fullmatch(event["name"]), event) for event in _annotations(events)]
    spans = [_span(event, base_ns) for match, event in named if match and (not steps or int(match[1]) in steps)]
    if not spans:
        return None
    return min(began for began, _ in spans), max(ended for _, ended in spans)


@dataclass
class Launches:
    """Finds the mesh axis of what runs on a device, by the range of the host in which it was launched."""

    events: Sequence[Event]
    axis_names: Mapping[str, str]
    ranges: dict[Any, tuple[list[float], list[Event]]] = field(default_factory=dict)
    launched: dict[Any, Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        by_thread: defaultdict[Any, list[Event]] = defaultdict(list)
        for event in _annotations(self.events):
            if parsed(event["name"]):
                by_thread[event["tid"]].append(event)
            elif event["name"].startswith(OF_NCCL):
                self.launched[OF_NCCL, event.get("args", {}).get("External id")] = event
        for thread, nested in by_thread.items():
            nested.sort(key=lambda event: event["ts"])
            self.ranges[thread] = [event["ts"] for event in nested], nested
        for event in self.events:
            if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {}):
                self.launched[event["args"]["correlation"]] = event

    def axis_of(self, event: Event) -> str | None:
        """The axis of a kernel or copy that communicates, or of torch's own range around one; None for all else."""
        args = event.get("args", {})
        if event["name"].startswith(OF_NCCL):
            return self._launched_for((OF_NCCL, args.get("External id")))
        is_copy = event["cat"] == "gpu_memcpy" and any(word in event["name"] for word in _BETWEEN_DEVICES)
        if not (is_copy or "nccl" in event["name"].lower()):
            return None
        group = str(args.get("Process Group Name", ""))
        return self._launched_for(args.get("correlation")) or self.axis_names.get(group) or group or "other"

    def _launched_for(self, key: object) -> str | None:
        launch = self.launched.get(key)
        if launch is None or launch["tid"] not in self.ranges:
            return None
        starts, nested = self.ranges[launch["tid"]]
        # The innermost of those that are open: the last that has begun by then and has not ended.
        for event in reversed(nested[: bisect.bisect_right(starts, launch["ts"])][-4:]):
            if event["ts"] + event.get("dur", 0) >= launch["ts"]:
                _, axis = parsed(event["name"]) or ("", "")
                return axis
        return None
