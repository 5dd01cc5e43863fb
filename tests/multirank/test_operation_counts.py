"""A step hands no more operations to the network than torch's libraries do for the same model."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed import fsdp as torch_fsdp

import disttrain
from disttrain import fsdp2
from disttrain.testing.pytest_plugin import on_ranks
from tests.multirank.test_fsdp2_models import batch, make_model, own_rows

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CASES = ["2d", "fsdp", "tp", "hsdp", "Interleaved1F1B", "GPipe", "1F1B", "ZBVZeroBubble", "checkpoint", "state dict"]


@contextmanager
def beside_torch() -> Iterator[ModuleType]:
    """The benchmark that counts, with torch.distributed initialised for itself."""
    rank, num_ranks = disttrain.get_rank(), disttrain.get_world_size()
    store = disttrain.current_world().store
    if rank == 0:
        server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set("port", str(server.port))
    own = torch.distributed.TCPStore("127.0.0.1", int(store.get("port")), is_master=False, wait_for_workers=False)
    torch.distributed.init_process_group("gloo", store=own, rank=rank, world_size=num_ranks)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        operations = importlib.import_module("operations")
        operations.SIZES = dataclasses.replace(operations.SIZES, layers=2)  # A third one adds the second's operations.
        yield operations
        disttrain.barrier()
    finally:
        sys.path.remove(str(BENCHMARKS))
        torch.distributed.destroy_process_group()


@pytest.mark.sweep(1)
@on_ranks(4)
@pytest.mark.filterwarnings("ignore")  # torch's libraries warn of themselves
@pytest.mark.parametrize("name", CASES)
def test_no_more_than_torch(name: str) -> None:
    with beside_torch() as operations:
        assert sorted(CASES) == sorted(operations.CASES)
        parts = dict(operations.compare(name))
        for part, sides in parts.items():
            ours = sides["ours"]
            assert ours.operations == ours.at_door, part
        total = {library: sum(sides[library].operations for sides in parts.values()) for library in ("ours", "torch")}
        assert total["ours"] <= total["torch"], parts


@pytest.mark.sweep(1)
@on_ranks(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert", "mixtral"])
def test_no_more_than_torch_for_models_of_others(name: str) -> None:
    with beside_torch() as operations:
        found = {}
        for library in (fsdp2, torch_fsdp):
            model, blocks = make_model(name)
            for block in blocks:
                library.fully_shard(block)
            library.fully_shard(model)
            inputs: dict[str, Any] = own_rows(batch(name, 0))

            def step(model: nn.Module = model, inputs: dict[str, Any] = inputs) -> None:
                model(**inputs).loss.backward()
                float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))

            step()
            found[library] = operations.counted(step)
        assert found[fsdp2].operations == found[fsdp2].at_door
        assert found[fsdp2].operations <= found[torch_fsdp].operations
