"""A timeline in letters: a row per rank, a column per unit of time, and the microbatch in each cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from disttrain.pipelining.pictures.look import NAMES, drawn, summary, turn
from disttrain.pipelining.schedule.action import Action, Op
from disttrain.pipelining.schedule.timeline import Timeline

# Background colours of the 256 (calm ones that black can be read on), for a rank's first and its other stages.
_COLOURS = {
    Op.FORWARD: (110, 153),
    Op.BACKWARD: (114, 157),
    Op.BACKWARD_INPUT: (114, 157),
    Op.BACKWARD_WEIGHT: (180, 223),
}
_BUBBLE = "·"
_MOST_UNITS = 4  # columns that the shortest computation may take


def draw_text(timeline: Timeline, *, width: int = 100, in_colour: bool = False) -> str:
    """As many blocks, one below the other, as it takes to keep within `width` characters.

    Without colours a cell begins with the kind, in lower case for a rank's second and later stages.
    """
    unit_s = _unit_s(timeline)
    cells = [_row(timeline, rank, unit_s) for rank in range(timeline.schedule.num_ranks)]
    cell_width = max((len(label) for row in cells for label, _ in row.values()), default=1) + (not in_colour)
    if in_colour:
        cell_width = max(2, cell_width)
    head_width = len(f"rank {len(cells) - 1} ")
    per_block = max(1, (width - head_width) // cell_width)
    num_units = round(timeline.makespan_s / unit_s) if unit_s else 0
    lines = [summary(timeline), _legend(timeline, in_colour)]
    for first in range(0, num_units, per_block):
        lines.append("")
        units = range(first, min(first + per_block, num_units))
        lines += (
            f"rank {rank:<{head_width - 6}} " + "".join(_cells(row, units, cell_width, in_colour))
            for rank, row in enumerate(cells)
        )
    return "\n".join(lines)


def _unit_s(timeline: Timeline) -> float:
    """The time of one column: the shortest computation, or a part of it into which the others go."""
    times = sorted({span.end_s - span.start_s for spans in timeline.compute for span in spans} - {0})
    for parts in range(1, _MOST_UNITS + 1):
        unit_s = times[0] / parts if times else 0
        if all(abs(time / unit_s - round(time / unit_s)) < 1e-6 for time in times):
            return unit_s
    return times[0] / 2 if times else 0


# By column: a label, and the colour.
_Row = dict[int, tuple[str, int]]


def _row(timeline: Timeline, rank: int, unit_s: float) -> _Row:
    """Draws one rank. What lasts longer than a column goes on without a label."""
    row: _Row = {}
    for span in timeline.compute[rank]:
        for part, start_s, end_s, lane, _ in drawn(span):
            first, last = round(start_s / unit_s), round(end_s / unit_s)
            # Children of an OVERLAP share its columns: the second one's label comes in the middle.
            middle = first + lane * max(1, (last - first) // len(span.action.parts))
            for column in range(middle, last):
                row[column] = (_label(timeline, part) if column == middle else "", _colour(timeline, part))
    return row


def _colour(timeline: Timeline, part: Action) -> int:
    return _COLOURS[part.op][turn(timeline, part.stage) > 0]


def _label(timeline: Timeline, part: Action) -> str:
    kind = part.op.value if turn(timeline, part.stage) == 0 else part.op.value.lower()
    return f"{kind}{part.microbatch}"


def _cells(row: _Row, units: range, width: int, in_colour: bool) -> Iterator[str]:
    for column in units:
        if column not in row:
            yield f"\x1b[2m{_BUBBLE:^{width}}\x1b[0m" if in_colour else f"{_BUBBLE:<{width}}"
            continue
        label, colour = row[column]
        if in_colour:
            yield f"\x1b[48;5;{colour};38;5;16m{label[1:]:^{width}}\x1b[0m"
        else:
            yield f"{label or '-':<{width}}"


def _legend(timeline: Timeline, in_colour: bool) -> str:
    ops = {part.op for spans in timeline.compute for span in spans for part in span.action.parts}
    shown: Sequence[Op] = [op for op in NAMES if op in ops]
    if in_colour:
        return "  ".join(f"\x1b[48;5;{_COLOURS[op][0]};38;5;16m {op.value} \x1b[0m {NAMES[op]}" for op in shown)
    return "  ".join(f"{op.value} {NAMES[op]}" for op in shown) + f"  {_BUBBLE} waiting"
