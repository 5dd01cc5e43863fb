"""What the code of docs/checkpoints.md takes for granted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as torch_checkpoint

import disttrain
from disttrain import checkpoint
from disttrain.checkpoint import training_state
from disttrain.checkpoint.interop import torch_optimizer_names
from disttrain.fsdp2 import fully_shard

NUM_RANKS = 2


def names(section: str) -> dict[str, Any]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if section == "Other formats":
        _write_files_of_others(plain)
    model = fully_shard(plain, mesh=disttrain.init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("dp",)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    state = training_state(model, optimizer)
    # What the launcher says to its workers.
    os.environ["DISTTRAIN_MEMORY_DIR"] = str(Path("memory").absolute())
    return {
        "model": model,
        "model_state": dict(state["model"]),
        "optimizer": optimizer,
        "state": state,
        "step": 40,
        "torch_optimizer_names": torch_optimizer_names,
        **{name: getattr(checkpoint, name) for name in checkpoint.__all__},
    }


def _write_files_of_others(model: nn.Module) -> None:
    if disttrain.get_rank() == 0:
        weights = model.state_dict()
        Path("models/llama").mkdir(parents=True)
        save_file(weights, "models/llama/model.safetensors")
        torch.save(weights, "model.pt")
        state = {"model": weights, "optimizer": torch.optim.AdamW(model.parameters()).state_dict()}
        torch_checkpoint.save(state, checkpoint_id="old/step-40", no_dist=True)
    disttrain.barrier()
