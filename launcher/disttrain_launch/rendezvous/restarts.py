"""Decides whether workers that failed are started again, and when; pure."""

from __future__ import annotations

from dataclasses import dataclass

from disttrain_launch.workers.outcome import Exit, Failed

QUICK_S = 10.0
"""A worker that fails within so long has got nothing done."""
MAX_BACK_OFF_S = 30.0


@dataclass(frozen=True)
class Again:
    """Start them once more."""

    after_s: float


@dataclass(frozen=True)
class GiveUp:
    note: str


class Restarts:
    """Counts failures. The first is followed by a new start at once; of those that follow quickly, each waits longer.

    Args: max_restarts  in all;  max_quick_failures  of one rank, with one exit code, in a row; 0: any number.
    """

    def __init__(self, max_restarts: int, max_quick_failures: int) -> None:
        self._max_restarts = max_restarts
        self._max_quick_failures = max_quick_failures
        self.num_restarts = 0
        self._num_quick = 0
        self._num_alike = 0
        self._last: tuple[int, int] | None = None

    def after(self, failed: Failed) -> Again | GiveUp:
        """Decides about this failure."""
        self._count(failed)
        if self.num_restarts >= self._max_restarts:
            return GiveUp(f"The job had been started {self.num_restarts + 1} times." if self.num_restarts else "")
        if 0 < self._max_quick_failures <= self._num_alike:
            return GiveUp(
                f"Rank {failed.rank} ended so {self._num_alike} times in a row ({Exit(failed.returncode)}), each time "
                f"within {QUICK_S:g} s: starting it again does not help. To try more often: --max-quick-failures."
            )
        self.num_restarts += 1
        return Again(0.0 if self._num_quick < 2 else min(2.0 ** (self._num_quick - 2), MAX_BACK_OFF_S))

    def _count(self, failed: Failed) -> None:
        this = (failed.rank, failed.returncode)
        if failed.ran_s >= QUICK_S:
            self._num_quick = self._num_alike = 0
        else:
            self._num_quick += 1
            self._num_alike = self._num_alike + 1 if this == self._last else 1
        self._last = this
