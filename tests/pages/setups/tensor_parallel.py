"""What the code of docs/tensor_parallel.md takes for granted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

import disttrain
from disttrain import tp
from disttrain.dtensor import Shard
from disttrain.fsdp2 import fully_shard
from tests.pages.models import HEAD, VOCABULARY, small_llama

NUM_RANKS = 4


def names(_: str) -> dict[str, Any]:
    model = small_llama()
    tokens, targets = torch.randint(VOCABULARY, (2, 8, 16))
    q, k, v = torch.randn(3, 8, 4, 16, HEAD)
    return {
        "F": F,
        "Shard": Shard,
        "fully_shard": fully_shard,
        "k": k,
        "mesh": disttrain.init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",)),
        "model": model,
        "num_dp": 2,
        "num_ranks": NUM_RANKS,
        "num_tokens": tokens.numel(),
        "num_tp": 2,
        "plan": tp.plan_for(model),
        "q": q,
        "self": SimpleNamespace(training=True),
        "targets": targets,
        "tokens": tokens,
        "tp": tp,
        "v": v,
        "vocab_size": VOCABULARY,
    }
