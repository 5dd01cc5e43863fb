"""Trackers of experiments: what a script passes to `disttrain.report`, in TensorBoard, Weights & Biases or MLflow.

    with track(TensorBoard("runs/1"), WandB(project="llama"), folder="runs/1", first_step=first_step):
        for step in range(first_step, num_steps):
            ...
            disttrain.report(step=step, loss=loss, tokens_per_s=rate)

Each name below is imported from its module when it is first used; their libraries, when a tracker begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from disttrain.lazy_names import lazily

if TYPE_CHECKING:
    from disttrain.trackers.ml_flow import MLflow as MLflow
    from disttrain.trackers.tensor_board import TensorBoard as TensorBoard
    from disttrain.trackers.tracker import Tracker as Tracker
    from disttrain.trackers.tracking import Tracking as Tracking
    from disttrain.trackers.tracking import track as track
    from disttrain.trackers.weights_and_biases import WandB as WandB

__getattr__, __dir__, __all__ = lazily(__name__)
