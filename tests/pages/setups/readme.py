"""What the code of README.md takes for granted."""

from __future__ import annotations

from typing import Any

import torch

import disttrain
from tests.pages.models import VOCABULARY, WIDTH, loss_fn, small_llama

NUM_RANKS = 2


def names(section: str) -> dict[str, Any]:
    num_ranks, rank = disttrain.get_world_size(), disttrain.get_rank()
    tokens, targets = torch.randint(VOCABULARY, (2, 8, 16), generator=torch.Generator().manual_seed(0))
    given = {"rank": rank, "num_ranks": num_ranks, "device": torch.device("cpu"), "loss_fn": loss_fn}
    model = small_llama()
    match section:
        case "As a library":
            return {}  # it is a whole script
        case "Tensor parallel":
            mesh = disttrain.init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
            return {"model": model, "mesh": mesh}
        case "Fused kernels":
            hidden = torch.randn(targets.numel(), WIDTH, requires_grad=True)
            return {"model": model, "head": model.head, "hidden": hidden, "targets": targets.flatten()}
        case _:
            return {**given, "model": model, "tokens": tokens, "targets": targets}
