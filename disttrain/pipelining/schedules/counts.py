"""Checks of counts that all generators share."""

from __future__ import annotations

from disttrain.errors import ScheduleError


def require_counts(schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> None:
    """Raises: ScheduleError unless all three are positive."""
    counts = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank}
    for name, count in counts.items():
        if count < 1:
            raise ScheduleError(schedule, f"{name} is {count}; there must be one at least.", f"Give {name} >= 1.")


def require_microbatches(schedule: str, num_microbatches: int, least: int, why: str) -> None:
    """Raises: ScheduleError when there are fewer than `least`."""
    if num_microbatches < least:
        raise ScheduleError(
            schedule,
            f"num_microbatches is {num_microbatches}; {why}, here {least}.",
            f"Split the batch into {least} microbatches or more, or choose a schedule that does with fewer, as 1F1B.",
        )


def microbatches_per_round(schedule: str, num_ranks: int, num_microbatches: int) -> int:
    """Counts the microbatches that visit one of a rank's stages before the next stage's turn: num_ranks, or up to twice
    as many where that makes rounds of equal size.

    Raises: ScheduleError when it does not.
    """
    num_rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % num_rounds == 0:
        return num_microbatches // num_rounds
    low = _next_allowed(num_ranks, num_microbatches, -1)
    high = _next_allowed(num_ranks, num_microbatches, 1)
    raise ScheduleError(
        schedule,
        f"num_microbatches is {num_microbatches}, which {num_rounds} rounds of at least {num_ranks} (the number of "
        "ranks) cannot share equally.",
        f"Split the batch into {low} or {high} microbatches.",
    )


def _next_allowed(num_ranks: int, num_microbatches: int, step: int) -> int:
    count = num_microbatches + step
    while count % max(1, count // num_ranks):
        count += step
    return count
