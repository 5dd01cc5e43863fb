"""Draws the losses of a run of models_gpu.py, and how far those in bf16 are from those in fp32.

python benchmarks/models/curves.py RESULTS.json > docs/images/kernels_loss.svg
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

EXACT, PLAIN = "torch fp32", "torch"
COLOURS = {EXACT: "#888888", PLAIN: "#c05020", "kernels": "#2060c0", "kernels compiled": "#208040"}
WIDTH, HEIGHT, MARGIN = 640, 220, 48
WINDOW = 9
"""Distances are medians over so many steps."""


def distances(losses: Sequence[float], exact: Sequence[float]) -> list[float]:
    """Of each step, relative, the median over its neighbours'."""
    each = [abs(one - other) / other for one, other in zip(losses, exact, strict=True)]
    return [statistics.median(each[max(0, at - WINDOW // 2) : at + WINDOW // 2 + 1]) for at in range(len(each))]


def chart(curves: dict[str, Sequence[float]], top: int, title: str, ticks: Sequence[float], is_log: bool) -> str:
    """One line for each of `curves`, between the first and the last tick."""
    low, high = (math.log10(tick) if is_log else tick for tick in (ticks[0], ticks[-1]))

    def place(at: int, value: float, count: int) -> str:
        height = math.log10(max(value, ticks[0])) if is_log else value
        share = min(1.0, max(0.0, (height - low) / (high - low)))
        return f"{MARGIN + (WIDTH - MARGIN) * at / (count - 1):.1f},{top + (HEIGHT - MARGIN) * (1 - share):.1f}"

    parts = [f'<text x="{MARGIN}" y="{top - 8}">{title}</text>']
    for tick in ticks:
        y = place(0, tick, 2).partition(",")[2]
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH}" y1="{y}" y2="{y}" stroke="#dddddd"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y}" text-anchor="end" dominant-baseline="middle">{tick:g}</text>')
    for name, values in curves.items():
        points = " ".join(place(at, value, len(values)) for at, value in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.5"/>')
    return "\n".join(parts)


def picture(losses: dict[str, Sequence[float]]) -> str:
    """Losses above, distances below."""
    exact = losses[EXACT]
    highest = math.ceil(max(map(max, losses.values())))
    apart = {name: distances(values, exact) for name, values in losses.items() if name != EXACT}
    legend = "\n".join(
        f'<text x="{MARGIN + 130 * at}" y="{2 * HEIGHT + 8}" style="fill: {COLOURS[name]}">{name}</text>'
        for at, name in enumerate(losses)
    )
    charts = (
        chart(losses, 24, "loss", range(0, highest + 1, 2 if highest > 4 else 1), is_log=False),
        chart(apart, HEIGHT + 24, "distance from fp32, relative", (1e-6, 1e-5, 1e-4, 1e-3, 1e-2), is_log=True),
    )
    return _svg([*charts, legend])


def _svg(parts: Iterable[str]) -> str:
    size = f'viewBox="0 0 {WIDTH + 8} {2 * HEIGHT + 16}"'
    style = "<style>text { font: 12px sans-serif; fill: #555555 }</style>"
    ground = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', style, ground, *parts, "</svg>"])


if __name__ == "__main__":
    rows = json.loads(Path(sys.argv[1]).read_text())["results"]["fsdp"]
    print(picture({name: rows[name]["losses"] for name in COLOURS if name in rows}))
