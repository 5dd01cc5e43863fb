"""Properties that all pictures share: the kind that an action is drawn as, its label, and one line that sums the
timeline up."""

from __future__ import annotations

from collections.abc import Iterator

from disttrain.pipelining.schedule.action import Action, Op
from disttrain.pipelining.schedule.timeline import Span, Timeline

NAMES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward for inputs",
    Op.BACKWARD_WEIGHT: "backward for weights",
}


def drawn(span: Span) -> Iterator[tuple[Action, float, float, int, int]]:
    """Each computation as (action, start_s, end_s, lane, number of lanes); an OVERLAP's children have a lane each."""
    parts = span.action.parts
    for lane, part in enumerate(parts):
        yield part, span.start_s, span.end_s, lane, len(parts)


def turn(timeline: Timeline, stage: int) -> int:
    """Returns the position of the stage among those of its rank, from 0."""
    placement = timeline.schedule.placement
    return placement.stages[placement.ranks[stage]].index(stage)


def summary(timeline: Timeline) -> str:
    """Name, counts, makespan, bubble, what is kept at most."""
    schedule = timeline.schedule
    per_rank = max(map(len, schedule.placement.stages))
    most = max(peak.held for peak in timeline.peaks)
    kept = f" · at most {plural(most, 'stage forward' if per_rank > 1 else 'forward')} kept" if most else ""
    return (
        f"{schedule.name} · {plural(schedule.num_ranks, 'rank')} x {plural(per_rank, 'stage')} · "
        f"{plural(schedule.num_microbatches, 'microbatch')} · makespan {timeline.makespan_s:g} · "
        f"bubble {timeline.bubble:.1%}{kept}"
    )


def plural(count: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `2 microbatches`."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending}"
