"""What the code of docs/profiling.md takes for granted."""

from __future__ import annotations

from typing import Any

import torch

import disttrain
from disttrain.fsdp2 import fully_shard

NUM_RANKS = 2


def names(_: str) -> dict[str, Any]:
    mesh = disttrain.init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("dp",))
    model = fully_shard(torch.nn.Linear(8, 8), mesh=mesh)

    def train(batch: torch.Tensor) -> None:
        model(batch).sum().backward()

    return {"torch": torch, "train": train, "batches": [torch.ones(4, 8)] * 6}
