"""The numbers of the flight recorder's summaries of steps, under names that trackers show in groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def summary_numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """Those of one summary (see `StepSummaries`) that are known."""
    numbers = {"time/step_s": summary["step_s"], "time/waiting_share": summary["waiting_share"]}
    numbers["time/communication_share"] = summary["communication_share"]
    numbers |= {f"communication_s/{name}": value for name, value in summary["communication_s"].items()}
    numbers |= {f"lateness_s/rank {rank}": value for rank, value in summary["lateness_s"].items()}
    return {name: value for name, value in numbers.items() if value is not None}
