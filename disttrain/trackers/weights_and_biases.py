"""Weights & Biases: a run of its own, or one that goes on under the same id."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any

from disttrain.trackers.tracker import Numbers, check_installed

_STEP = "step"


class WandB:
    """Sends numbers to Weights & Biases. `options` are those of `wandb.init`: project, name, dir, mode="offline", ...

    A step is a number like others there, and the axis of all: wandb's own step never goes back, as that of a run does
    which is resumed from a checkpoint. Raises SettingError where wandb is not installed.
    """

    name = "wandb"

    def __init__(self, **options: Any) -> None:
        check_installed("WandB", "wandb", "wandb")
        self._options = options
        self._run: Any = None

    def open(self, run_id: str | None, first_step: int, config: Mapping[str, Any]) -> str:
        """See `Tracker`."""
        wandb = importlib.import_module("wandb")  # here: it takes seconds to load, and one rank writes
        options = {"id": run_id, "resume": None if run_id is None else "allow", **self._options}
        if options["id"] is not None:
            # wandb names files by the second and the id: of one second the later run would write into the earlier's.
            time.sleep(1 - time.time() % 1)
        self._run = wandb.init(**options, config={**config, **(self._options.get("config") or {})})
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)
        return str(self._run.id)

    def log(self, numbers: Numbers, step: int, time_s: float) -> None:
        """See `Tracker`."""
        self._run.log({**numbers, _STEP: step})

    def flush(self) -> None:
        """wandb sends as it likes."""

    def close(self) -> None:
        """See `Tracker`; waits until all has been sent."""
        self._run.finish()
