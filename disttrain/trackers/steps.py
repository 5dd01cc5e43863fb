"""Puts the reports of all ranks together, step by step, as the launcher's table does. Pure, torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from disttrain.reports import combined

HOLD_S: Final = 5.0
"""The time that a step waits for ranks that have not reported yet, and may never."""
PATIENCE_S: Final = 60.0
"""The time that it waits for those that have reported before."""

Entry = tuple[int, float, dict[str, float]]
"""A step, the time of the report, and its numbers."""


@dataclass
class _Step:
    since_s: float
    time_s: float
    numbers: dict[int, dict[str, float]] = field(default_factory=dict)


@dataclass
class Steps:
    """Steps of which not all ranks have told. Whether a rank reports at all is not known beforehand: a script may let
    each rank say its part, or one rank all of it."""

    world_size: int
    open: dict[int, _Step] = field(default_factory=dict)
    told_up_to: dict[int, int] = field(default_factory=dict)
    """By rank; ranks that have left are above all steps."""
    num_late: int = 0
    _done: int | None = None

    def hear(self, rank: int, entry: Entry, now_s: float) -> None:
        """Take what a rank tells of a step. What comes after its step has been given out is counted as late."""
        step, time_s, numbers = entry
        goes_back = step <= self.told_up_to.get(rank, -1)
        if self._done is not None and step <= self._done and step not in self.open and not goes_back:
            self.num_late += 1
        else:
            self.open.setdefault(step, _Step(now_s, time_s)).numbers[rank] = numbers
        self.told_up_to[rank] = step

    def leave(self, rank: int) -> None:
        """Nothing more comes from there."""
        self.told_up_to[rank] = 1 << 62

    def due(self, now_s: float, *, all_of_them: bool = False) -> Iterator[Entry]:
        """The steps that are complete, or have waited for long enough, in their order."""
        for number in sorted(self.open):
            step = self.open[number]
            waited_s = now_s - step.since_s
            is_told = all(number <= told for told in self.told_up_to.values())
            is_complete = is_told and (len(self.told_up_to) == self.world_size or waited_s >= HOLD_S)
            if not (is_complete or waited_s >= PATIENCE_S or all_of_them):
                return
            del self.open[number]
            self._done = number if self._done is None else max(self._done, number)
            yield number, step.time_s, _together(step.numbers)


def _together(by_rank: dict[int, dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for numbers in by_rank.values() for name in numbers)
    return {name: combined(name, [numbers[name] for numbers in by_rank.values() if name in numbers]) for name in names}
