"""What the code of docs/float8.md takes for granted."""

from __future__ import annotations

from typing import Any

import disttrain
from disttrain import kernels, tp
from disttrain.fsdp2 import fully_shard
from tests.pages.models import small_llama

NUM_RANKS = 2


def names(_: str) -> dict[str, Any]:
    model = small_llama()
    return {
        "fully_shard": fully_shard,
        "kernels": kernels,
        "mesh": disttrain.init_device_mesh("cpu", (1, NUM_RANKS), mesh_dim_names=("dp", "tp")),
        "model": model,
        "parallelize_module": tp.parallelize_module,
        "plan": tp.plan_for(model),
    }
