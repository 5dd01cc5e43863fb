"""What the code of docs/moving_over.md takes for granted."""

from __future__ import annotations

from typing import Any

import torch

import disttrain

NUM_RANKS = 2


def names(section: str) -> dict[str, Any]:
    if section in ("Coming from DDP", "Half and half"):
        # As init_process_group does, which pages don't call: their ranks have a job.
        disttrain.current_world().default_group.to_torch()
        return {"loss_sum": torch.tensor(1.5), "num_seen": 3, "model": torch.nn.Linear(8, 8)}
    model = torch.nn.Linear(8, 8)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())} if section == "Checkpoints" else {}
