"""The protocol of trackers, and the error where the library of one is not installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Protocol

from disttrain.errors import SettingError

Numbers = Mapping[str, float]


class Tracker(Protocol):
    """Keeps numbers by step, for one run. All ranks make it, and one uses it, on a thread of its own: each method may
    take its time, or raise; training goes on."""

    @property
    def name(self) -> str:
        """Names the tracker in messages, and its run's id in the file of ids."""
        ...

    def open(self, run_id: str | None, first_step: int, config: Mapping[str, Any]) -> str:
        """Begin a run, or go on with the one of that id, of which the steps from `first_step` on are done again.

        Returns: the run's id, with which another process can go on.
        """
        ...

    def log(self, numbers: Numbers, step: int, time_s: float) -> None:
        """Keep numbers of one step, told at this time (seconds since 1970). Steps may come again, and skip some."""
        ...

    def flush(self) -> None:
        """Makes visible what was logged, if it can; called whenever nothing more waits."""
        ...

    def close(self) -> None:
        """End the run for this process; another may go on with it."""
        ...


def check_installed(operation: str, module: str, requirement: str) -> None:
    """Raises SettingError where `module` is not installed; does not load it."""
    if find_spec(module) is None:
        raise SettingError(operation, f"{module} is not installed.", f"Run: pip install {requirement}")
