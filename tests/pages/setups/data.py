"""What the code of docs/data.md takes for granted."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import disttrain
from disttrain import checkpoint
from disttrain.checkpoint import training_state
from disttrain.data import Loader, SampleOrder, StreamLoader, TokenArray, TokenWriter
from disttrain.fsdp2 import fully_shard

NUM_RANKS = 2


def names(section: str) -> dict[str, Any]:
    torch.manual_seed(0)
    mesh = disttrain.init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("dp",))
    model = fully_shard(nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)), mesh=mesh)
    if not section and disttrain.get_rank() == 0:
        with TokenWriter("shards", "uint8") as writer:
            writer.add(np.arange(1000) % 50)
    disttrain.barrier()
    documents = np.array([5, 6, 7, 0, 8, 9, 0], dtype=np.uint16)
    if section == "Streaming sets":
        _install_a_set_from_elsewhere()
    own: dict[str, Any] = {"dataset": list(range(10)), "tokens": TokenArray([documents])}
    if section == "Going on from a checkpoint":
        own["SampleOrder"] = SampleOrder
        own["loader"] = Loader(own["dataset"], 4, mesh=mesh["dp"])
    return {
        **own,
        "StreamLoader": StreamLoader,
        "checkpoint": checkpoint,
        "collate": torch.tensor,
        "device": torch.device("cpu"),
        "loss_of": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        "mesh": mesh,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "torch": torch,
        "training_state": training_state,
    }


def _install_a_set_from_elsewhere() -> None:
    """What the page uses of Hugging Face's `datasets`, with a set that need not be fetched."""
    whole, distributed = ModuleType("datasets"), ModuleType("datasets.distributed")

    def load_dataset(name: str, *, split: str, streaming: bool) -> range:
        assert (split, streaming) == ("train", True), name
        return range(10_000)

    def split_dataset_by_node(data: Iterable[int], rank: int, world_size: int) -> list[int]:
        return [*data][rank::world_size]

    vars(whole)["load_dataset"] = load_dataset
    vars(distributed)["split_dataset_by_node"] = split_dataset_by_node
    sys.modules["datasets"], sys.modules["datasets.distributed"] = whole, distributed
