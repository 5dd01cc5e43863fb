"""Writes many ranks down in few words: those of a node, or of a mesh's group, are one run each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_MOST_RUNS: Final = 200
_LONG: Final = 3


def to_runs(ranks: Sequence[int]) -> str:
    """Ranks as `first:count:step`, a run for each stretch of equal steps, with commas between."""
    runs: list[str] = []
    start = 0
    while start < len(ranks):
        end = start + 1
        step = ranks[end] - ranks[start] if end < len(ranks) else 1
        while end < len(ranks) and step > 0 and ranks[end] - ranks[end - 1] == step:
            end += 1
        runs.append(f"{ranks[start]}:{end - start}:{max(step, 1)}")
        start = end
    return ",".join(runs)


def from_runs(runs: str) -> list[int]:
    """The ranks that `to_runs` has written."""
    return [rank for first, count, step in _parsed(runs) for rank in range(first, first + count * step, step)]


def is_among(runs: str, rank: int) -> bool:
    """True for a rank that `to_runs` has written; in as many steps as there are runs."""
    return any(rank in range(first, first + count * step, step) for first, count, step in _parsed(runs))


def in_words(ranks: Sequence[int]) -> str:
    """Ascending ranks as `0, 4-7, 9`; of very many runs the first ones, and how many ranks follow."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [
        f"{first}-{last}" if last - first >= _LONG - 1 else ", ".join(map(str, range(first, last + 1)))
        for first, last in runs[:_MOST_RUNS]
    ]
    num_more = sum(last - first + 1 for first, last in runs[_MOST_RUNS:])
    return ", ".join(parts) + (f" and {num_more} more" if num_more else "")


def _parsed(runs: str) -> list[tuple[int, int, int]]:
    parts = [run.split(":") for run in runs.split(",") if run]
    return [(int(first), int(count), int(step)) for first, count, step in parts]
