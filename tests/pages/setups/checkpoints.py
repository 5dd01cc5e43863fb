"""What the code of docs/checkpoints.md takes for granted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as torch_checkpoint

import disttrain
from disttrain import checkpoint
from disttrain.checkpoint import training_state
from disttrain.checkpoint.fsspec_storage import FsspecStorage
from disttrain.checkpoint.interop import torch_optimizer_names
from disttrain.fsdp2 import fully_shard

NUM_RANKS = 2


class Buckets(LocalFileSystem):
    """Stands for what serves S3 and Google Cloud Storage: `s3://` and `gs://` are a folder here."""

    protocol = ("s3", "gs")

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        scheme, separator, rest = path.partition("://")
        return str(super()._strip_protocol(f"buckets/{rest}" if separator and scheme in cls.protocol else path))


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
    if section == "On S3, Google Cloud Storage, in memory":
        for name in ("s3", "gs"):
            fsspec.register_implementation(name, Buckets, clobber=True)
        checkpoint.save(state, "gs://bucket/runs/lm/step-00000040")
    # What the launcher says to its workers.
    os.environ["DISTTRAIN_MEMORY_DIR"] = str(Path("memory").absolute())
    return {
        "FsspecStorage": FsspecStorage,
        "fsspec": fsspec,
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
