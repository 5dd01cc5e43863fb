"""The trackers that a run writes to, by their names in `--track`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from disttrain.trackers import MLflow, TensorBoard, Tracker, WandB

PROJECT = "disttrain-llama"

TRACKERS: dict[str, Callable[[Path], Tracker]] = {
    "tensorboard": lambda folder: TensorBoard(folder / "tensorboard"),
    # As their own environment variables say: WANDB_MODE=offline, MLFLOW_TRACKING_URI, ...
    "wandb": lambda folder: WandB(project=PROJECT, name=folder.name, dir=str(folder)),
    "mlflow": lambda folder: MLflow(PROJECT, run_name=folder.name),
}


def make_trackers(names: str, folder: Path) -> list[Tracker]:
    """Trackers of the run in `folder`, by names with commas between. Raises SettingError where a library is missing."""
    return [TRACKERS[name](folder) for name in names.split(",") if name]
