"""What the code of docs/flight_recorder.md takes for granted."""

from __future__ import annotations

from typing import Any

import torch

import disttrain

NUM_RANKS = 2


def names(_: str) -> dict[str, Any]:
    return {"batches": [torch.ones(4)] * 12, "train": disttrain.all_reduce}
