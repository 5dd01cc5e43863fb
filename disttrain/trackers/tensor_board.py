"""TensorBoard: event files in a folder, by torch's writer or tensorboardX's."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from disttrain.errors import SettingError
from disttrain.trackers.tracker import Numbers


class TensorBoard:
    """Writes scalars into `folder`. Of a run that goes on, TensorBoard hides what is done again.

    Raises SettingError where there is neither tensorboard nor tensorboardX.
    """

    name = "tensorboard"

    def __init__(self, folder: Path | str) -> None:
        self._folder = str(folder)
        self._module = "torch.utils.tensorboard" if find_spec("tensorboard") else "tensorboardX"
        if find_spec(self._module.partition(".")[0]) is None:
            problem = "neither tensorboard nor tensorboardX is installed."
            raise SettingError("TensorBoard", problem, "Run: pip install tensorboard")
        self._writer: Any = None

    def open(self, run_id: str | None, first_step: int, config: Mapping[str, Any]) -> str:
        """See `Tracker`; the id is the folder."""
        # Here: it takes seconds to load, and one rank writes.
        make = importlib.import_module(self._module).SummaryWriter
        # tensorboardX names files by the second alone, and writes over what is there.
        self._writer = make(self._folder, purge_step=first_step or None, filename_suffix=f".{os.getpid()}.{first_step}")
        if config:
            rows = "\n".join(f"| {name} | {value} |" for name, value in config.items())
            self._writer.add_text("config", f"| | |\n| --- | --- |\n{rows}", first_step)
        return self._folder

    def log(self, numbers: Numbers, step: int, time_s: float) -> None:
        """See `Tracker`."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step, walltime=time_s)

    def flush(self) -> None:
        """See `Tracker`."""
        self._writer.flush()

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close()
