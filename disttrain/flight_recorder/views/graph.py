"""The wait-for graph as a picture: boxes of ranks that are alike, and an arrow to those that each waits for.

Those that wait stand on the left, those that wait for nobody on the right; a circle is drawn as one. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from disttrain.flight_recorder.analysis.waiting.wait_graph import Wait
from disttrain.flight_recorder.analysis.wording import call_text, location, waited_s
from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.record.record import ranks_text
from disttrain.flight_recorder.views.words import call_name, doing

MAX_BOXES: Final = 24
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 280, 62, 130, 26, 12
_MAX_LETTERS: Final = 38
_ARROW: Final = """<defs>
<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path class="tip" d="M0 0.5 L8 4 L0 7.5 z"/></marker></defs>"""


@dataclass(frozen=True)
class Box:
    """Ranks that wait in the same call for the same others, or that do the same while others wait for them."""

    ranks: tuple[int, ...]
    title: str
    text: str
    for_ranks: frozenset[int]
    longest_s: float
    is_blamed: bool


def boxes_of(waits: Sequence[Wait], dumps: Mapping[int, Dump], blamed: Collection[int]) -> list[Box]:
    """All boxes of the graph, those that wait first."""
    by_rank: dict[int, list[Wait]] = {}
    for wait in waits:
        by_rank.setdefault(wait.rank, []).append(wait)
    alike: dict[tuple[str, str, frozenset[int], bool], list[int]] = {}
    longest_s: dict[int, float] = {}
    for rank, rank_waits in by_rank.items():
        longest_s[rank] = max(waited_s(dumps[rank], wait.record) for wait in rank_waits)
        record = rank_waits[0].record
        more = f" and {len(rank_waits) - 1} more" if len(rank_waits) > 1 else ""
        text = "; ".join(
            f"{call_text(wait.record)} at {location(dumps[rank], wait.record.site.stack)}" for wait in rank_waits[:4]
        )
        others = frozenset(other for wait in rank_waits for other in wait.for_ranks)
        alike.setdefault((call_name(record) + more, text, others, rank in blamed), []).append(rank)
    for rank in sorted({rank for wait in waits for rank in wait.for_ranks} - set(by_rank)):
        text = doing(dumps[rank]) if rank in dumps else "no dump"
        alike.setdefault((text, text, frozenset(), rank in blamed), []).append(rank)
    return [
        Box(tuple(ranks), title, text, others, max(longest_s.get(rank, 0.0) for rank in ranks), is_blamed)
        for (title, text, others, is_blamed), ranks in alike.items()
    ]


def draw_graph(boxes: Sequence[Box]) -> str:
    """SVG; the page's style has its colours."""
    shown = sorted(boxes, key=lambda box: (not box.is_blamed, -len(box.ranks)))[:MAX_BOXES]
    edges = [(a, b) for a, box in enumerate(shown) for b, other in enumerate(shown) if box.for_ranks & set(other.ranks)]
    spots = _spots(len(shown), edges)
    left_edge, top = min(x for x, _ in spots), min(y for _, y in spots)
    spots = [(x - left_edge + _MARGIN, y - top + _MARGIN) for x, y in spots]
    width = max(x for x, _ in spots) + _WIDTH + _MARGIN
    height = max(y for _, y in spots) + _HEIGHT + _MARGIN
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    lines = [
        f'<svg class="graph" {size} role="img" aria-label="who waits for whom">{_ARROW}',
        *(_edge(shown[a], spots[a], spots[b]) for a, b in edges if a != b),
        *(_box(box, spot) for box, spot in zip(shown, spots, strict=True)),
        "</svg>",
    ]
    if len(boxes) > len(shown):
        lines.append(f'<p class="note">{len(boxes) - len(shown)} smaller boxes are left out.</p>')
    return "\n".join(lines)


def _spots(num_boxes: int, edges: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    """The upper left corner of each box."""
    level = {box: 0 for box in range(num_boxes) if not any(a == box for a, _ in edges)}
    if not level and num_boxes > 1:
        radius = max(_HEIGHT * 1.6, (_WIDTH + 40) * num_boxes / (2 * math.pi))
        turns = [2 * math.pi * box / num_boxes - math.pi / 2 for box in range(num_boxes)]
        return [(1.2 * radius * math.cos(turn), 0.8 * radius * math.sin(turn)) for turn in turns]
    frontier = list(level)
    while frontier:
        reached = frontier.pop(0)
        for a, b in edges:
            if b == reached and a not in level:
                level[a] = level[b] + 1
                frontier.append(a)
    far = max(level.values(), default=0)
    columns: dict[int, list[int]] = {}
    for box in range(num_boxes):
        columns.setdefault(far - level.get(box, far), []).append(box)
    tallest = max(map(len, columns.values()))
    spots = {}
    for column, boxes in columns.items():
        down = (tallest - len(boxes)) / 2
        for row, box in enumerate(boxes):
            spots[box] = (column * (_WIDTH + _GAP_X), (row + down) * (_HEIGHT + _GAP_Y))
    return [spots[box] for box in range(num_boxes)]


def _edge(box: Box, start: tuple[float, float], end: tuple[float, float]) -> str:
    """An arrow from the side of a box that faces the other, with the time of the wait at its beginning."""
    (x1, y1), (x2, y2) = start, end
    if abs(x2 - x1) >= _WIDTH:
        turn = 1 if x2 > x1 else -1
        ax, ay = x1 + (_WIDTH if turn > 0 else 0), y1 + _HEIGHT / 2
        bx, by = x2 + (0 if turn > 0 else _WIDTH), y2 + _HEIGHT / 2
        bend = turn * max(30.0, abs(bx - ax) / 2)
        path = f"M{ax:.0f} {ay:.0f} C{ax + bend:.0f} {ay:.0f} {bx - bend:.0f} {by:.0f} {bx - 2 * turn:.0f} {by:.0f}"
    else:
        turn = 1 if y2 > y1 else -1
        # Both ways between two boxes: each beside the other.
        aside = 24 * turn
        ax, ay = x1 + _WIDTH / 2 + aside, y1 + (_HEIGHT if turn > 0 else 0)
        bx, by = x2 + _WIDTH / 2 + aside, y2 + (0 if turn > 0 else _HEIGHT)
        path = f"M{ax:.0f} {ay:.0f} L{bx:.0f} {by - 2 * turn:.0f}"
    x, y = (ax + bx) / 2, (ay + by) / 2 - 7
    waited = f'<text class="edge" x="{x:.0f}" y="{y:.0f}">{box.longest_s:.1f} s</text>'
    return f'<path class="wire" d="{path}" marker-end="url(#arrow)"/>{waited}'


def _box(box: Box, spot: tuple[float, float]) -> str:
    x, y = spot
    kind = "blamed" if box.is_blamed else "waits" if box.for_ranks or box.longest_s else "end"
    who = ranks_text(box.ranks)
    return (
        f'<g class="box {kind}"><title>{escape(who)}: {escape(box.text)}</title>'
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>'
        f'<text class="who" x="{x + 14:.0f}" y="{y + 25:.0f}">{escape(_short(who, 28))}</text>'
        f'<text x="{x + 14:.0f}" y="{y + 45:.0f}">{escape(_short(box.title, _MAX_LETTERS))}</text></g>'
    )


def _short(text: str, num_letters: int) -> str:
    return text if len(text) <= num_letters else text[: num_letters - 1] + "…"
