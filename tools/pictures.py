"""The pictures in docs/images that are drawn by programs: `python tools/pictures.py` makes them again.

Schedules are drawn by disttrain.pipelining. The architecture is the import linter's contract, so that it is what the
checks hold the code to; a mesh and placements are what disttrain's own arithmetic of ranks and parts says. Loads of
experts are those of a run: `train_llama.py --experts 8 --top-k 2 --mesh ep=2` on two processes, its third block, means
over five steps of what it writes into experts.csv (`tools/expert_loads.csv`). Who has which positions of a sequence,
and does what in the steps of a ring, is what attention's own plan says.
"""

from __future__ import annotations

import csv
import re
import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path

from disttrain.dtensor import Replicate, Shard, local_shape_and_offset
from disttrain.kernels import Causal
from disttrain.kernels.attention.context.parts import Parts, contiguous, mirrored
from disttrain.kernels.attention.context.planning.steps import RING, Step, steps_of
from disttrain.kernels.attention.context.planning.tiles import tiles_of
from disttrain.mesh import MeshLayout
from disttrain.pipelining import Costs, draw_svg, make_schedule, simulate

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
STYLE = """
.drawing { color-scheme: light dark; font: 13px system-ui, -apple-system, 'Segoe UI', sans-serif; }
.drawing text { fill: #1f2733; text-anchor: middle; dominant-baseline: central; }
.drawing .note { fill: #5b6474; font-size: 12px; } .drawing .paper { fill: #ffffff; }
.drawing .plain { fill: #eef0f3; } .drawing rect { stroke: #ffffff; stroke-width: 1.5; }
.drawing .c0 { fill: #9dbfe6; } .drawing .c1 { fill: #f0c99a; }
.drawing .c2 { fill: #9fd0ae; } .drawing .c3 { fill: #d3b5e0; }
.drawing path { fill: none; stroke-width: 1.6; } .drawing .rule { stroke: #c3c9d3; stroke-width: 1; }
.drawing .left { text-anchor: start; } .drawing .right { text-anchor: end; }
@media (prefers-color-scheme: dark) {
.drawing text { fill: #e3e7ee; } .drawing .note { fill: #9aa5b8; } .drawing .paper { fill: #1c2027; }
.drawing .plain { fill: #2f3641; } .drawing rect { stroke: #1c2027; }
.drawing .c0 { fill: #35608f; } .drawing .c1 { fill: #8a6229; }
.drawing .c2 { fill: #3b7350; } .drawing .c3 { fill: #6d4a80; }
.drawing .rule { stroke: #444d5c; }
}
"""


def box(x: float, y: float, width: float, height: float, label: str = "", kind: str = "plain") -> str:
    """A rectangle with a text in its middle."""
    # A letter is about 8 wide.
    small = f' style="font-size: {13 * (width - 8) / (8 * len(label)):.1f}px"' if 8 * len(label) > width - 8 else ""
    text = f'<text x="{x + width / 2:g}" y="{y + height / 2:g}"{small}>{escape(label)}</text>' if label else ""
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>{text}'


def note(x: float, y: float, text: str) -> str:
    return f'<text class="note" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def drawing(width: int, height: int, title: str, parts: list[str]) -> str:
    """A whole SVG."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" {size} role="img" aria-label="{escape(title)}">'
    paper = f'<rect class="paper" width="{width}" height="{height}"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", paper, *parts, "</svg>", ""])


def architecture() -> str:
    """The layers of disttrain, from the linter's contract, and the launcher beside the lowest ones."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    rows = [[name for name in re.findall(r"\w+", layer) if not name.startswith("__")] for layer in layers]
    step, width = 40, 920
    parts = [box(20, 14, width - 44, 30, "your script", "c3")]
    for number, row in enumerate(rows):
        begins = 220 if number >= len(rows) - 3 else 20
        each = (width - 20 - begins) / len(row)
        y = 14 + step * (number + 1)
        parts += [
            box(begins + place * each, y, each - 4, 30, name, f"c{number % 2 * 2}") for place, name in enumerate(row)
        ]
    top = 14 + step * (len(rows) - 2)
    parts.append(box(20, top, 190, 3 * step - 10, "disttrain_launch", "c1"))
    bottom = 14 + step * (len(rows) + 1)
    parts.append(
        note(
            width / 2,
            bottom + 8,
            "a part knows only those below it; the launcher, the store and what is below load no torch",
        )
    )
    return drawing(width, bottom + 26, "The parts of disttrain, each above those that it knows", parts)


def mesh() -> str:
    """Eight ranks on a mesh of two axes."""
    layout = MeshLayout(tuple(range(8)), (2, 4), ("dp", "tp"))
    parts = [note(290, 18, "tp: each layer is cut over these"), note(58, 88, "dp: rows"), note(58, 106, "of the batch")]
    for rank in layout.ranks:
        row, column = layout.coordinate(rank) or (0, 0)
        parts.append(box(120 + 90 * column, 36 + 52 * row, 84, 46, f"rank {rank}", f"c{row * 2}"))
    pairs = [layout.along(column, [0]).ranks for column in range(4)]
    parts.append(note(290, 158, f"groups along dp: {', '.join(str(list(ranks)) for ranks in pairs)}"))
    parts.append(
        note(290, 178, f"groups along tp: {list(layout.along(0, [1]).ranks)}, {list(layout.along(4, [1]).ranks)}")
    )
    return drawing(560, 196, "Eight ranks on a mesh of dp=2, tp=4", parts)


def placements() -> str:
    """A tensor of 4 x 4 on two ranks, by four placements."""
    parts = [note(34, 62 + 82 * rank, f"rank {rank}") for rank in range(2)]
    ways = {"Shard(0)": Shard(0), "Shard(1)": Shard(1), "Replicate()": Replicate(), "Partial()": Replicate()}
    cells = [(row, column) for row in range(4) for column in range(4)]
    for number, (name, placement) in enumerate(ways.items()):
        left = 80 + 120 * number
        parts.append(note(left + 36, 14, name))
        for rank, kind in enumerate(("c0", "c2")):
            held, sign = set(_held(placement, rank)), "+" if name == "Partial()" else ""
            for row, column in cells:
                place = (left + 18 * column, 28 + 82 * rank + 18 * row)
                parts.append(box(*place, 18, 18, sign, kind if (row, column) in held else "plain"))
    parts.append(note(280, 206, "coloured: what the rank holds; +: a term of each element's sum"))
    return drawing(560, 224, "Shard(0), Shard(1), Replicate and Partial on two ranks", parts)


def _held(placement: Shard | Replicate, rank: int) -> Iterator[tuple[int, int]]:
    shape, offset = local_shape_and_offset((4, 4), (2,), (rank,), (placement,))
    for row in range(offset[0], offset[0] + shape[0]):
        for column in range(offset[1], offset[1] + shape[1]):
            yield row, column


def schedule(name: str) -> str:
    """Four ranks, eight microbatches; F, I and W take one unit each for a rank's part."""
    plan = make_schedule(name, 4, 8)
    return draw_svg(simulate(plan, Costs().split(max(map(len, plan.placement.stages)))))


COLOURS = ("#4c84c4", "#d98a2b", "#3f9a63", "#9a62b8", "#c4504f", "#3a9fa8", "#a58a1f", "#8a8f99")


def expert_loads() -> str:
    """Tokens of each expert over the mean, from the first step to the last."""
    with (ROOT / "tools" / "expert_loads.csv").open(newline="", encoding="utf-8") as file:
        names, *rows = csv.reader(file)
    steps, left, bottom, width, height = [int(row[0]) for row in rows], 60, 250, 500, 220
    most = 3.0

    def at(step: int, load: float) -> str:
        return f"{left + width * step / 400:.1f},{bottom - height * load / most:.1f}"

    parts = []
    for load in (0, 1, 2, 3):
        y = bottom - height * load / most
        parts.append(f'<path class="rule" d="M{left},{y:.1f} H{left + width}"/>')
        parts.append(f'<text class="note right" x="{left - 8}" y="{y:.1f}">{load}</text>')
    parts += [note(left + width * step / 400, bottom + 16, str(step)) for step in (0, 100, 200, 300, 400)]
    for number, name in enumerate(names[1:]):
        points = " L".join(at(step, float(row[number + 1])) for step, row in zip(steps, rows, strict=True))
        parts.append(f'<path stroke="{COLOURS[number]}" d="M{points}"/>')
        y = 40 + 22 * number
        parts.append(f'<path stroke="{COLOURS[number]}" d="M{left + width + 20},{y} h18"/>')
        parts.append(f'<text class="note left" x="{left + width + 44}" y="{y}">{escape(name)}</text>')
    parts.append(f'<text class="note left" x="{left}" y="14">tokens of an expert over the mean</text>')
    parts.append(note(left + width / 2, bottom + 36, "steps"))
    return drawing(660, 300, "Loads of eight experts over 400 steps, which come close to the mean", parts)


NUM_CHUNKS, CHUNK = 8, 1024
"""Of a sequence on four ranks."""


def context_parts() -> str:
    """Which queries see which keys under a causal rule, coloured by the rank that computes it, by two cuts."""
    parts, size = [], 28
    for number, (name, cut) in enumerate({"contiguous": contiguous, "mirrored": mirrored}.items()):
        plan = cut(NUM_CHUNKS * CHUNK, 4)
        left, top = 100 + 330 * number, 66
        parts.append(note(left + 4 * size, 14, name))
        owners = [_owner(plan, chunk * CHUNK) for chunk in range(NUM_CHUNKS)]
        for row, rank in enumerate(owners):
            parts.append(box(left + size * row, top - 34, size, 24, str(rank), f"c{rank}"))
            parts.append(box(left - 34, top + size * row, 24, size, str(rank), f"c{rank}"))
            for column in range(NUM_CHUNKS):
                kind = f"c{rank}" if column <= row else "plain"
                parts.append(box(left + size * column, top + size * row, size, size, "", kind))
        bottom = top + NUM_CHUNKS * size
        work = [sum(row + 0.5 for row, owner in enumerate(owners) if owner == rank) for rank in range(4)]
        shares = ", ".join(f"{100 * each / sum(work):.0f} %" for each in work)
        parts.append(note(left + 4 * size, bottom + 18, f"work of ranks 0 to 3: {shares}"))
    parts.append(note(36, 14, "keys →"))
    parts.append(note(36, 34, "queries ↓"))
    return drawing(690, 326, "Four ranks' shares of causal attention, contiguous and mirrored", parts)


def _owner(parts: Parts, position: int) -> int:
    return next(rank for rank, ranges in enumerate(parts.ranges) if any(position in run for run in ranges))


def context_ring() -> str:
    """What each of four ranks computes in the steps of a ring, and what comes to it meanwhile."""
    tiles = tiles_of(mirrored(NUM_CHUNKS * CHUNK, 4), Causal())
    pitch, top = 144, 34
    parts = [note(80 + pitch * number + 66, 14, f"step {number}") for number in range(4)]
    for rank in range(4):
        steps = steps_of(tiles, rank, RING)
        y = top + 62 * rank
        parts.append(note(36, y + 13, f"rank {rank}"))
        for number, step in enumerate(steps):
            x, source = 80 + pitch * number, (rank - number) % 4
            parts.append(box(x, y, 66 * _area(step) / CHUNK**2, 26, f"sees keys of {source}", f"c{source}"))
            for coming, ranges in steps[number + 1].receives if number + 1 < len(steps) else ():
                width = 52 * sum(map(len, ranges)) / CHUNK
                parts.append(box(x, y + 28, width, 16, f"from {coming}", f"c{coming}"))
    bottom = top + 62 * 4
    parts.append(note(80 + 2 * pitch, bottom, "above: attention; below: keys of the next step, which come meanwhile"))
    return drawing(670, bottom + 18, "Four steps of a ring: keys come while those before are computed", parts)


def _area(step: Step) -> float:
    """Pairs of a query and a key that are computed."""
    return sum(
        len(piece.queries) * len(piece.keys) * (0.5 if piece.band is not None and 0 in piece.band else 1)
        for piece in step.pieces
    )


def pictures() -> dict[str, str]:
    """All of them, by file name."""
    schedules = {name: schedule(name) for name in ("1f1b", "zbv")}
    named = {"architecture": architecture(), "mesh": mesh(), "placements": placements(), **schedules}
    named |= {"expert_loads": expert_loads(), "context_parts": context_parts(), "context_ring": context_ring()}
    return {f"{name}.svg": picture for name, picture in named.items()}


def main() -> None:
    for name, picture in pictures().items():
        (IMAGES / name).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
