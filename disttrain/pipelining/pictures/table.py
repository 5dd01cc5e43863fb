"""Schedules side by side, the fastest first."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.console import table
from disttrain.pipelining.searching.search import Found

_HEAD = ("schedule", "stages per rank", "placement", "makespan", "bubble", "waits between", "kept", "messages")


def compare_table(results: Sequence[Found], in_colour: bool) -> str:
    """`waits between`: the most that a rank waits after its first action and before its last; `kept`: microbatches
    that the fullest rank keeps, by its costs; `messages`: that the busiest rank sends."""
    rows = [_row(result) for result in sorted(results, key=lambda result: result.score)]
    lines = table(_HEAD, rows, words=(0, 2)).splitlines()
    if in_colour:
        lines[0] = f"\x1b[1m{lines[0]}\x1b[0m"
    return "\n".join(lines)


def _row(result: Found) -> tuple[str, ...]:
    timeline, placement = result.timeline, result.schedule.placement
    sent = [0] * result.schedule.num_ranks
    for transfer in timeline.transfers:
        sent[transfer.from_rank] += 1
    return (
        result.schedule.name,
        str(max(map(len, placement.stages))),
        placement.kind,
        f"{timeline.makespan_s:.6g}",
        f"{timeline.bubble:.1%}",
        f"{max(timeline.idle_s):.6g}",
        f"{result.num_bytes:.6g}",
        str(max(sent)),
    )
