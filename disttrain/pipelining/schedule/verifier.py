"""Proves a schedule before it runs: nothing missing, nothing twice, every order possible, no deadlock, memory within
bounds."""

from __future__ import annotations

from collections.abc import Iterator

from disttrain._python.garbage import uncollected
from disttrain.errors import ScheduleError
from disttrain.pipelining import checks
from disttrain.pipelining.checks import Problem
from disttrain.pipelining.schedule.liveness import peaks
from disttrain.pipelining.schedule.schedule import Schedule

_CHECKS = (
    checks.check_actions,
    checks.check_counts,
    checks.check_order,
    checks.check_sharding,
    checks.check_messages,
    checks.check_deadlock,
)


def verify(schedule: Schedule, *, max_live: int | None = None, max_pending: int | None = None) -> None:
    """Say nothing of a schedule that is right.

    A schedule of computations only is judged as one whose outputs travel by themselves.

    Args: max_live  forwards that a rank may keep without their I or B;  max_pending  I that it may keep without W.
    Raises: ScheduleError with the first problem, and how many more there are.
    """
    problems = find_problems(schedule, max_live=max_live, max_pending=max_pending)
    if problems:
        more = f" {len(problems) - 1} more like it." if len(problems) > 1 else ""
        first = problems[0]
        raise ScheduleError(schedule.name, first.text + more, first.remedy, rank=first.rank, where=first.where)


@uncollected()
def find_problems(schedule: Schedule, *, max_live: int | None = None, max_pending: int | None = None) -> list[Problem]:
    """All that break the first rule that is broken: what follows from it is not listed."""
    for check in _CHECKS:
        if problems := list(check(schedule)):
            return problems
    if max_live is None and max_pending is None:
        return []
    return list(_beyond_bounds(schedule, max_live, max_pending))


def _beyond_bounds(schedule: Schedule, max_live: int | None, max_pending: int | None) -> Iterator[Problem]:
    for rank, peak in enumerate(peaks(schedule)):
        if max_live is not None and peak.live > max_live:
            text = f"The rank keeps {peak.live} forwards for their backwards, {max_live} are allowed."
            yield Problem(text, "Choose a schedule with a shorter warmup, as V-Min.", rank)
        if max_pending is not None and peak.pending > max_pending:
            text = f"The rank keeps {peak.pending} inputs of W, {max_pending} are allowed."
            yield Problem(text, "Run each W sooner.", rank)
