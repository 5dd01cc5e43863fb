"""Durations: torch's signatures take a `timedelta`, ours take seconds; inside there are only seconds."""

from __future__ import annotations

from datetime import timedelta

from disttrain.errors import SettingError

Duration = float | timedelta


_NOT_AT_ALL_S = 1e-3
"""The duration that stands for none where only positive ones are known; a request takes about as long."""


def seconds_or_none_at_all(operation: str, duration: Duration) -> float:
    """Seconds as `seconds`, but zero means not to wait, as torch's stores have it."""
    value: object = duration
    is_zero = isinstance(value, float | int | timedelta) and not value
    return _NOT_AT_ALL_S if is_zero else seconds(operation, duration)


def seconds(operation: str, duration: Duration) -> float:
    """`duration` in seconds; raises SettingError unless it is positive."""
    try:
        value = duration.total_seconds() if isinstance(duration, timedelta) else float(duration)
    except (RuntimeError, TypeError, ValueError) as error:
        problem = f"the timeout is {duration!r}, which is no duration."
        raise SettingError(operation, problem, "Give seconds or a timedelta.") from error
    if not value > 0:
        raise SettingError(
            operation, f"the timeout is {duration!r}; it must be positive.", "Give seconds or a timedelta."
        )
    return value
