"""Rows out of what benchmarks on GPUs report: objects in objects, in which somewhere sides stand beside each other.

    {"llama8": {"disttrain": {"step_ms": 490, "min_ms": 487, "peak_gib": 62}, "torch": {...}}}

Each metric that two sides have is a row. Of several sides that are torch's the best one is compared; where a report has
the least and the median alone, these are the spread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness import OURS, TORCH, Row, Spread

UNITS = {
    "step_ms": "ms",
    "ms": "ms",
    "peak_gib": "GiB",
    "peak_mib": "MiB",
    "warm_stall_s": "s",
    "commit_s": "s",
    "synchronous_s": "s",
}
"""Metrics, of which less is better."""
WORDS = {
    "peak_gib": "peak",
    "peak_mib": "peak",
    "warm_stall_s": "stall, not the first",
    "commit_s": "commit, not the first",
    "synchronous_s": "save",
}
RATES = {"GB/s"}
MAINLY = ("disttrain", "ours", "kernel", "kernels", "disttrain compiled", "kernels compiled")
"""Which of ours is compared, the first that is there."""
TORCHS = {"eager", "inductor"}
"""Of a kernel's ways."""


def rows_of(report: Mapping[str, Any]) -> list[Row]:
    """All comparisons in a report, in its order; none where nothing of torch's stands beside ours."""
    return list(_rows(report, ()))


def _rows(node: Any, path: tuple[str, ...]) -> Iterator[Row]:
    if isinstance(node, list):
        for one in node:
            yield from _rows(one, path)
    if not isinstance(node, dict):
        return
    if isinstance(node.get("seconds"), dict):
        whole = ("whole step",) if node.get("is_whole_step") else ()
        milliseconds = {side: Spread(*[1e3 * s] * 3) for side, s in node["seconds"].items() if s is not None}
        yield from _compared((*path, node["name"], *whole), "ms", milliseconds)
        return
    sides = {name: of for name, of in node.items() if isinstance(of, dict) and _has_figures(of) and not _is_ratio(name)}
    if any(_is_torchs(name) for name in sides) and not all(_is_torchs(name) for name in sides):
        unit = node.get("unit")
        if unit is not None:
            yield from _compared(path, unit, {name: _spread(of, {}) for name, of in sides.items()})
        for metric in UNITS if unit is None else ():
            having = {name: _spread(of[metric], of) for name, of in sides.items() if metric in of}
            yield from _compared((*path, *([WORDS[metric]] if metric in WORDS else [])), UNITS[metric], having)
        return
    sizes = (f"{node['tokens']} x {node['vocab']}",) if {"tokens", "vocab"} <= node.keys() else ()
    for name, inner in node.items():
        is_word = name in ("cases", "results", "details")
        yield from _rows(inner, (*path, *sizes) if is_word else (*path, name))


def _has_figures(of: Mapping[str, Any]) -> bool:
    return "median" in of or any(metric in of for metric in UNITS)


def _is_ratio(side: str) -> bool:
    return side == "ratio" or " over " in side


def _is_torchs(side: str) -> bool:
    return side.startswith("torch") or side in TORCHS


def _spread(value: Any, beside: Mapping[str, Any]) -> Spread:
    if isinstance(value, dict):
        median = float(value["median"])
        return Spread(
            median,
            float(value.get("lower", value.get("min", median))),
            float(value.get("upper", value.get("max", median))),
        )
    least = beside.get("min_ms") if value in (beside.get("step_ms"), beside.get("ms")) else None
    return Spread(float(value), float(value if least is None else least), float(value))


def _compared(path: tuple[str, ...], unit: str, sides: Mapping[str, Spread]) -> Iterator[Row]:
    theirs = {name: of for name, of in sides.items() if _is_torchs(name)}
    ours = next((name for name in MAINLY if name in sides), None) or next((n for n in sides if n not in theirs), None)
    if not theirs or ours is None:
        return
    is_rate = unit in RATES
    best = min(theirs, key=lambda name: theirs[name].median * (-1 if is_rate else 1))
    which = f" (torch: {best.removeprefix('torch').strip(', ')})" if best != "torch" else ""
    named = {OURS if name == ours else TORCH if name == best else name: of for name, of in sides.items()}
    yield Row(", ".join(path) + which if path else f"step{which}", unit, named, more_is_better=is_rate)
