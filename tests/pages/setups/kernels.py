"""What the code of docs/kernels.md takes for granted."""

from __future__ import annotations

from typing import Any

import torch

import disttrain
from disttrain import kernels
from disttrain.dtensor import Replicate, Shard, distribute_tensor
from disttrain.fsdp2 import fully_shard
from tests.pages.models import HEAD, VOCABULARY, WIDTH, small_llama

NUM_RANKS = 2


def names(section: str) -> dict[str, Any]:
    model = small_llama()
    mesh = disttrain.init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
    tokens, targets = torch.randint(VOCABULARY, (2, 4, 16), generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(targets.numel(), WIDTH, requires_grad=True)
    weight = model.head.weight.detach()
    query, key, value = torch.randn(3, 2, 4, 16, HEAD)
    return {
        "dtensor_hidden": distribute_tensor(hidden.detach(), mesh, [Replicate()]),
        "dtensor_weight": distribute_tensor(weight, mesh, [Shard(0)]),
        "fully_shard": fully_shard,
        "head": model.head,
        "hidden": hidden,
        "kernels": kernels,
        "key": key,
        "mesh": mesh,
        "model": model,
        "part": weight.chunk(NUM_RANKS)[disttrain.get_rank()],
        "query": query,
        "targets": targets.flatten() if section == "A loss without logits" else targets,
        "tokens": tokens,
        "value": value,
        "vocab_size": VOCABULARY,
    }
