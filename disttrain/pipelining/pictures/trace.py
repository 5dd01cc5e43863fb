"""A timeline in Chrome's trace format, for chrome://tracing, Perfetto and their like.

Each rank is a process, with threads for computing, for collectives, for what it sends and for what it receives; an
arrow goes from each send to its receive.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from disttrain.pipelining.schedule.timeline import Span, Timeline

_COMPUTE, _COLLECTIVES, _SENDS, _RECEIVES = range(4)
_THREADS = {_COMPUTE: "compute", _COLLECTIVES: "unshard, reduce", _SENDS: "sends", _RECEIVES: "receives"}


def chrome_trace(timeline: Timeline, *, us_per_unit: float = 1e6) -> str:
    """JSON. Timelines are in seconds, traces in microseconds; papers' units are drawn as seconds."""
    return json.dumps({"traceEvents": list(_events(timeline, us_per_unit)), "displayTimeUnit": "ms"})


def _events(timeline: Timeline, scale: float) -> Iterator[dict[str, Any]]:
    for rank in range(timeline.schedule.num_ranks):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for thread, name in _THREADS.items():
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}
        yield from (_event(span, rank, _COMPUTE, scale) for span in timeline.compute[rank])
        yield from (_event(span, rank, _COLLECTIVES, scale) for span in timeline.collectives[rank])
    for number, transfer in enumerate(timeline.transfers):
        span = Span(transfer.send, transfer.start_s, transfer.end_s)
        yield _event(span, transfer.from_rank, _SENDS, scale)
        yield _event(Span(transfer.send.other_end, span.start_s, span.end_s), transfer.to_rank, _RECEIVES, scale)
        flow = {"name": "message", "cat": "message", "id": number}
        yield flow | {"ph": "s", "pid": transfer.from_rank, "tid": _SENDS, "ts": transfer.start_s * scale}
        yield flow | {"ph": "f", "bp": "e", "pid": transfer.to_rank, "tid": _RECEIVES, "ts": transfer.end_s * scale}


def _event(span: Span, rank: int, thread: int, scale: float) -> dict[str, Any]:
    action = span.action
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.op.value,
        "pid": rank,
        "tid": thread,
        "ts": span.start_s * scale,
        "dur": (span.end_s - span.start_s) * scale,
        "args": {"stage": action.stage, "microbatch": action.microbatch},
    }
