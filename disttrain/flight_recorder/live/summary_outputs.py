"""Hooks for `StepSummaries`: a text file that Prometheus reads, and TensorBoard."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from disttrain.trackers.summaries import summary_numbers
from disttrain.trackers.tensor_board import TensorBoard


class PrometheusFile:
    """Keeps `path` in Prometheus's text format, for the node exporter's textfile collector; replaced in one step.

    https://prometheus.io/docs/instrumenting/exposition_formats/
    """

    def __init__(self, path: Path | str, labels: Mapping[str, str] | None = None) -> None:
        """`labels` are added to each line: the job's name, say."""
        self._path = Path(path)
        self._labels = dict(labels or {})

    def __call__(self, summary: dict[str, Any]) -> None:
        """Write `summary`. Raises OSError."""
        # The collector reads *.prom only; this name it leaves alone.
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        temporary.write_text("".join(self._lines(summary)), encoding="utf-8")
        temporary.replace(self._path)

    def _lines(self, summary: dict[str, Any]) -> Iterator[str]:
        groups = [({"group": name}, value) for name, value in summary["communication_s"].items()]
        ranks = [({"rank": str(rank)}, value) for rank, value in summary["lateness_s"].items()]
        alone: dict[str, str] = {}
        waiting = summary["waiting_share"]
        for name, help_text, values in (
            ("step_number", "Steps so far.", [(alone, summary["step"])]),
            ("step_seconds", "Time per step, mean over ranks.", [(alone, summary["step_s"])]),
            ("step_ranks", "Ranks that have told of these steps.", [(alone, summary["num_ranks"])]),
            ("waiting_ratio", "Share of a step in which ranks wait.", [] if waiting is None else [(alone, waiting)]),
            (
                "communication_ratio",
                "Share of a step with a call under way.",
                [(alone, summary["communication_share"])],
            ),
            ("communication_seconds", "Time per step in communication, mean over ranks.", groups),
            ("lateness_seconds", "By how much less a rank waits per step than the others.", ranks),
        ):
            if not values:
                continue
            yield f"# HELP disttrain_{name} {help_text}\n# TYPE disttrain_{name} gauge\n"
            for labels, value in values:
                inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in {**self._labels, **labels}.items())
                yield f"disttrain_{name}{'{' + inside + '}' if inside else ''} {value}\n"


class TensorBoardScalars:
    """Writes scalars to `folder`. Raises SettingError where there is neither tensorboard nor tensorboardX."""

    def __init__(self, folder: Path | str) -> None:
        self._board = TensorBoard(folder)
        self._board.open(None, 0, {})

    def __call__(self, summary: dict[str, Any]) -> None:
        """Add `summary`'s numbers at its step."""
        self._board.log(summary_numbers(summary), summary["step"], time.time())
        self._board.flush()


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
