"""Draws a part of a trace that `disttrain.profile` has left: `python tools/profile_picture.py TRACE OUT.png`.

For docs/images/profile.png: a step of each rank, with its main thread's ranges and operators, and the communication
under way.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

MAX_DEPTH = 3
COLOURS = {
    "ProfilerStep": "#dfe3ea",
    "fully_shard gather": "#9dbfe6",
    "fully_shard reduce": "#9fd0ae",
    "fully_shard free": "#d3b5e0",
    "fully_shard wait": "#eeb4ae",
    "collective": "#5b8fc9",
    "wait": "#c0392b",
    "operators": "#b9c2cf",
    "communication under way": "#f0c99a",
}
OTHERS = "#eef0f3"
SHOWN = ("ProfilerStep", "fully_shard", "pipeline", "tensor parallel", "collective", "message", "wait", "Optimizer")

Event = dict[str, Any]


def rows(events: list[Event], rank: int) -> list[tuple[str, list[tuple[int, Event]]]]:
    """Of a rank: its main thread, and tracks of communication, each with events and how deep they lie."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["pid"] == rank and e["name"] == "thread_name"}
    found = []
    for track in sorted(names):
        is_main, is_communication = names[track] == "main thread", names[track].startswith("communication")
        if not (is_main or is_communication):
            continue
        chosen = [e for e in events if e["pid"] == rank and e.get("tid") == track and e["ph"] == "X"]
        if is_main:
            found.append(("operators", [(0, {**e, "name": "operators"}) for e in chosen if e["cat"] == "cpu_op"]))
            chosen = [e for e in chosen if e["cat"] == "user_annotation" and e["name"].startswith(SHOWN)]
        chosen.sort(key=lambda e: (e["ts"], -e["dur"]))
        open_until: list[float] = []
        placed = []
        for event in chosen:
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            if len(open_until) < MAX_DEPTH:
                placed.append((len(open_until), event))
            open_until.append(event["ts"] + event["dur"])
        found.insert(0 if is_main else len(found), (names[track], placed))
    return found


def colour(event: Event) -> str:
    name = "communication under way" if event["cat"] == "communication" else event["name"]
    return next((value for prefix, value in COLOURS.items() if name.startswith(prefix)), OTHERS)


def draw(trace: Path, picture: Path) -> None:
    data = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    events = [event for event in json.loads(data)["traceEvents"] if event["ph"] in ("X", "M")]
    ranks = sorted({event["pid"] for event in events if event["name"] == "process_name"})
    steps = sorted({event["name"] for event in events if event["name"].startswith("ProfilerStep")})
    spans = [event for event in events if event["name"] == steps[-1]]
    first, last = min(e["ts"] for e in spans), max(e["ts"] + e["dur"] for e in spans)
    figure = Figure(figsize=(12, 6.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    y, ticks = 0.0, []
    for rank in ranks:
        for name, placed in rows(events, rank):
            depth = 1 + max((level for level, _ in placed), default=0)
            for level, event in placed:
                begin, end = max(event["ts"], first), min(event["ts"] + event["dur"], last)
                if end <= begin:
                    continue
                axes.barh(y + level, (end - begin) / 1e3, left=(begin - first) / 1e3, height=0.9, color=colour(event),
                          edgecolor="white", linewidth=0.4 if event["cat"] != "cpu_op" else 0.0)  # fmt: skip
                label = event["name"]
                if event["cat"] != "cpu_op" and (end - begin) / (last - first) * 170 > len(label):
                    axes.text((begin + end - 2 * first) / 2e3, y + level, label, ha="center", va="center", fontsize=7)
            if not ticks or ticks[-1][1] != f"rank {rank}: {name}":
                ticks.append((y + (depth - 1) / 2, f"rank {rank}: {name}"))
            y += depth + 0.4
        y += 0.5
    axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks], fontsize=9)
    axes.set_ylim(y - 0.5, -0.7)
    axes.set_xlim(0, (last - first) / 1e3)
    axes.set_xlabel("ms")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    handles = [Patch(color=value, label=name) for name, value in COLOURS.items() if name != "ProfilerStep"]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(picture)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
