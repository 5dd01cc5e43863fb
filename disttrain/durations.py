"""Durations: torch's signatures take a `timedelta`, ours take seconds; inside there are only seconds."""

from __future__ import annotations

from datetime import timedelta

from disttrain.errors import SettingError

Duration = float | timedelta


def seconds(operation: str, duration: Duration) -> float:
    """`duration` in seconds; raises SettingError unless it is positive."""
    value = duration.total_seconds() if isinstance(duration, timedelta) else float(duration)
    if not value > 0:
        raise SettingError(
            operation, f"the timeout is {duration!r}; it must be positive.", "Give seconds or a timedelta."
        )
    return value
