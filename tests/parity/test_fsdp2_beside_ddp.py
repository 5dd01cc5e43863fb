"""The example under fully_shard and under torch's DDP, over the same data: one curve, and the same bits in each run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import train_llama
from llama.config import PRESETS
from llama.meshes import parse_mesh
from llama.model import Llama
from llama.parallel import Ways, place
from llama.steps import Loss, mean_loss
from llama.tokens import read_tokens
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import disttrain
from disttrain.data import Loader, Windows
from disttrain.dtensor import DTensor
from disttrain.store import PrefixStore
from disttrain.testing import RankPool

NUM_RANKS = 2
NUM_STEPS = 30
ROWS = 4
SEED = 4


def sharded() -> nn.Module:
    mesh = train_llama.make_mesh(parse_mesh("dp=2", NUM_RANKS), torch.device("cpu"))
    return place(PRESETS["tiny"], mesh, None, Ways(), length=32, seed=SEED).model


def copied() -> nn.Module:
    """torch's DDP, which runs on our transports."""
    world = disttrain.current_world()
    store, rank, size = world.store.clone(), world.rank, world.world_size
    disttrain.destroy_process_group()
    disttrain.init_process_group(
        store=PrefixStore("ddp", store), rank=rank, world_size=size, timeout=120, register_with_torch=True
    )
    model = Llama(PRESETS["tiny"])
    model.init(SEED)
    return DistributedDataParallel(model)


def run(kind: str) -> dict[str, Any]:
    """Rank task: the loss of each step, averaged over the ranks, and the parameters in the end."""
    model = {"sharded": sharded, "ddp": copied}[kind]()
    optimizer = train_llama.make_optimizer(model, uses_kernels=False)
    plan = parse_mesh("dp=2", NUM_RANKS)
    loss_of = Loss(PRESETS["tiny"], train_llama.make_mesh(plan, torch.device("cpu"))["tp"], is_lean=False)
    windows = Windows(read_tokens(str(Path(train_llama.__file__).parent), "bytes", 32).training, 32, seed=SEED)
    batches = Loader(windows, NUM_RANKS * ROWS, seed=SEED, endless=True)
    losses = []
    for step, rows in zip(range(NUM_STEPS), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = train_llama.learning_rate(step, NUM_STEPS, 0.003)
        loss = loss_of(model(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_loss(loss, plan))
    wholes = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {"losses": torch.tensor(losses), "parameters": torch.cat([whole.detach().flatten() for whole in wholes])}


@pytest.fixture(scope="module")
def of_fully_shard(rank_pool: RankPool) -> dict[str, Any]:
    """What rank 0 saw; the others saw the same."""
    first, *others = rank_pool.run(NUM_RANKS, run, {"kind": "sharded"})
    for other in others:
        assert torch.equal(first["losses"], other["losses"])
        assert torch.equal(first["parameters"], other["parameters"])
    assert first["losses"][-1] < first["losses"][0] - 1.2
    return first


def test_the_curve_is_that_of_ddp(rank_pool: RankPool, of_fully_shard: dict[str, Any]) -> None:
    for of_ddp in rank_pool.run(NUM_RANKS, run, {"kind": "ddp"}):
        torch.testing.assert_close(of_fully_shard["losses"], of_ddp["losses"], rtol=0, atol=1e-5)
        torch.testing.assert_close(of_fully_shard["parameters"], of_ddp["parameters"], rtol=1e-3, atol=1e-4)


def test_another_run_is_the_same_to_the_bit(rank_pool: RankPool, of_fully_shard: dict[str, Any]) -> None:
    for again in rank_pool.run(NUM_RANKS, run, {"kind": "sharded"}):
        assert torch.equal(of_fully_shard["losses"], again["losses"])
        assert torch.equal(of_fully_shard["parameters"], again["parameters"])
