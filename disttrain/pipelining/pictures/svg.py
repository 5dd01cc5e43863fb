"""A timeline as SVG: a row per rank, grey where it waits, thin lines for messages. It brings its colours for light and
dark backgrounds along, and needs no script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from disttrain.pipelining.pictures.look import NAMES, drawn, summary, turn
from disttrain.pipelining.schedule.action import SENDS, Action, Op
from disttrain.pipelining.schedule.timeline import Timeline

_CLASSES = {Op.FORWARD: "f", Op.BACKWARD: "b", Op.BACKWARD_INPUT: "i", Op.BACKWARD_WEIGHT: "w"}
_ROW, _GAP, _LEFT, _TOP, _RIGHT, _BOTTOM = 26, 10, 64, 62, 112, 34
_LABEL_WIDTH = 7  # of a digit, with some room
# Each rule begins with the picture's class, for it may be put into a page that has other texts and boxes.
_STYLE = """
.pipeline { color-scheme: light dark; font: 11px system-ui, -apple-system, 'Segoe UI', sans-serif; }
.pipeline text { fill: #3b4252; } .pipeline .title { font-size: 13px; font-weight: 600; }
.pipeline .small { font-size: 10px; fill: #7a8290; } .pipeline .paper { fill: #ffffff; }
.pipeline .idle { fill: #eef0f3; } .pipeline .axis { stroke: #d5d9e0; stroke-width: 1; }
.pipeline .wire { fill: none; stroke: #8a93a3; stroke-width: 0.7; opacity: 0.45; }
.pipeline .cell text { fill: #1f2733; text-anchor: middle; dominant-baseline: central; }
.pipeline .f { fill: #9dbfe6; } .pipeline .f1 { fill: #c6dbf3; }
.pipeline .b { fill: #8fc7c9; } .pipeline .b1 { fill: #bfe1e2; }
.pipeline .i { fill: #9fd0ae; } .pipeline .i1 { fill: #c8e6d0; }
.pipeline .w { fill: #ecc998; } .pipeline .w1 { fill: #f6e2c4; }
.pipeline .box { stroke: #ffffff; stroke-width: 1; }
@media (prefers-color-scheme: dark) {
.pipeline text { fill: #d8dee9; } .pipeline .small { fill: #8f99ab; } .pipeline .paper { fill: #1c2027; }
.pipeline .idle { fill: #2a303a; } .pipeline .axis { stroke: #3b4350; }
.pipeline .wire { stroke: #9aa5b8; opacity: 0.4; } .pipeline .cell text { fill: #10151c; }
.pipeline .f { fill: #6f9bd1; } .pipeline .f1 { fill: #a3c2e6; }
.pipeline .b { fill: #62a9ab; } .pipeline .b1 { fill: #9fd0d1; }
.pipeline .i { fill: #76b58a; } .pipeline .i1 { fill: #a9d5b6; }
.pipeline .w { fill: #d2a767; } .pipeline .w1 { fill: #e6cb9f; }
.pipeline .box { stroke: #1c2027; }
}
"""


def draw_svg(timeline: Timeline, *, width: int = 1400) -> str:
    """A picture `width` pixels wide, or wider where microbatches' numbers would not fit into their boxes otherwise."""
    return "\n".join(_Drawing(timeline, width).lines()) + "\n"


@dataclass(frozen=True)
class _Point:
    x: float
    y: float


class _Drawing:
    def __init__(self, timeline: Timeline, width: int) -> None:
        self.timeline = timeline
        self.num_ranks = timeline.schedule.num_ranks
        self.makespan_s = timeline.makespan_s or 1
        digits = len(str(timeline.schedule.num_microbatches - 1))
        shortest_s = min((span.end_s - span.start_s for rank in timeline.compute for span in rank), default=1) or 1
        readable = (_LABEL_WIDTH * digits + 3) / shortest_s
        # So wide a picture that numbers fit, unless nobody would scroll that far.
        self.scale = max((width - _LEFT - _RIGHT) / self.makespan_s, min(readable, 8000 / self.makespan_s))
        self.has_labels = self.scale >= readable
        self.width = round(_LEFT + self.makespan_s * self.scale + _RIGHT)
        self.height = _TOP + self.num_ranks * (_ROW + _GAP) + _BOTTOM

    def lines(self) -> Iterator[str]:
        title = escape(summary(self.timeline))
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="pipeline" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{title}">'
        )
        yield f"<style>{_STYLE}</style>"
        yield f'<rect class="paper" width="{self.width}" height="{self.height}"/>'
        yield f'<text class="title" x="16" y="24">{title}</text>'
        yield from self._legend()
        for rank in range(self.num_ranks):
            yield from self._row(rank)
        yield from self._wires()
        yield from self._axis()
        yield "</svg>"

    def _x(self, time_s: float) -> float:
        return round(_LEFT + time_s * self.scale, 1)

    def _y(self, rank: int) -> float:
        return _TOP + rank * (_ROW + _GAP)

    def _legend(self) -> Iterator[str]:
        """Darker for a rank's first stage, lighter for its later ones."""
        ops = {part.op for rank in self.timeline.compute for span in rank for part in span.action.parts}
        several = len(self.timeline.schedule.placement.stages[0]) > 1
        x = 16.0
        entries = [(_CLASSES[op], f"{_CLASSES[op]}1" if several else "", NAMES[op]) for op in NAMES if op in ops]
        for first, later, name in [*entries, ("idle", "", "waiting")]:
            for shade in filter(None, (first, later)):
                yield f'<rect class="box {shade}" x="{x:g}" y="36" width="14" height="12" rx="2"/>'
                x += 15
            yield f'<text x="{x + 4:g}" y="46">{name}</text>'
            x += 24 + 6 * len(name)
        if several:
            yield f'<text class="small" x="{x:g}" y="46">dark: a rank\'s first stage, light: later ones</text>'

    def _row(self, rank: int) -> Iterator[str]:
        y, middle = self._y(rank), self._y(rank) + _ROW / 2
        end = self.makespan_s * self.scale
        peak = self.timeline.peaks[rank]
        idle = 1 - self.timeline.busy_s[rank] / self.makespan_s
        yield f'<text x="16" y="{middle:g}" dominant-baseline="central">rank {rank}</text>'
        yield f'<rect class="idle" x="{_LEFT}" y="{y:g}" width="{end:.1f}" height="{_ROW}" rx="3"/>'
        for span in self.timeline.compute[rank]:
            for part, start_s, end_s, lane, num_lanes in drawn(span):
                yield self._cell(part, start_s, end_s, y + lane * _ROW / num_lanes, _ROW / num_lanes)
        note = f"{idle:.0%} idle" + (f", keeps {peak.held}" if peak.held else "")
        yield f'<text class="small" x="{_LEFT + end + 8:.1f}" y="{middle:g}" dominant-baseline="central">{note}</text>'

    def _cell(self, part: Action, start_s: float, end_s: float, y: float, height: float) -> str:
        x, right = self._x(start_s), self._x(end_s)
        shade = _CLASSES[part.op] + ("1" if turn(self.timeline, part.stage) else "")
        label = ""
        if self.has_labels:
            size = "" if height > 14 else ' font-size="9"'
            label = f'<text x="{(x + right) / 2:g}" y="{y + height / 2:g}"{size}>{part.microbatch}</text>'
        tip = f"<title>{part}, {start_s:g} to {end_s:g}</title>"
        box = f'<rect class="box {shade}" x="{x:g}" y="{y:g}" width="{right - x:g}" height="{height:g}" rx="2"/>'
        return f'<g class="cell">{box}{label}{tip}</g>'

    def _wires(self) -> Iterator[str]:
        """From the end of what computed a message to its arrival, in the gaps between rows."""
        for transfer in self.timeline.transfers:
            assert transfer.send.op in SENDS
            down = transfer.to_rank > transfer.from_rank
            start = _Point(self._x(transfer.ready_s), self._y(transfer.from_rank) + (_ROW if down else 0))
            end = _Point(self._x(transfer.end_s), self._y(transfer.to_rank) + (0 if down else _ROW))
            bend = _GAP * 0.6 * (1 if down else -1)
            yield (
                f'<path class="wire" d="M{start.x:g} {start.y:g}C{start.x:g} {start.y + bend:g} '
                f'{end.x:g} {end.y - bend:g} {end.x:g} {end.y:g}"/>'
            )

    def _axis(self) -> Iterator[str]:
        y = self._y(self.num_ranks) + 2
        yield f'<path class="axis" d="M{_LEFT} {y:g}H{self._x(self.makespan_s):g}"/>'
        step_s = _tick(self.makespan_s, self.makespan_s * self.scale / 90)
        for number in range(int(self.makespan_s / step_s + 1e-9) + 1):
            x = self._x(number * step_s)
            yield f'<path class="axis" d="M{x:g} {y:g}v4"/>'
            yield f'<text class="small" x="{x:g}" y="{y + 16:g}" text-anchor="middle">{number * step_s:g}</text>'


def _tick(makespan_s: float, most: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0**-9
    while True:
        for factor in (1, 2, 5):
            if makespan_s / (factor * power) <= max(1, most):
                return factor * power
        power *= 10
