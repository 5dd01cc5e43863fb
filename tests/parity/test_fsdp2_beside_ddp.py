"""The example under fully_shard and under torch's DDP, over the same data: one curve, and the same bits in each run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import train_lm
from lm.model import PRESETS, Llama
from lm.ranks import mean_over_ranks, own_rows
from lm.text import read_text
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import disttrain
from disttrain.dtensor import DTensor
from disttrain.store import PrefixStore
from disttrain.testing import RankPool

NUM_RANKS = 2
NUM_STEPS = 50
SEED = 4


def sharded() -> nn.Module:
    return train_lm.make_model("tiny", seed=SEED, device=torch.device("cpu"), dtype=torch.float32)


def copied() -> nn.Module:
    """torch's DDP, which runs on our transports."""
    world = disttrain.current_world()
    store, rank, size = world.store.clone(), world.rank, world.world_size
    disttrain.destroy_process_group()
    disttrain.init_process_group(
        store=PrefixStore("ddp", store), rank=rank, world_size=size, timeout=30, register_with_torch=True
    )
    model = Llama(PRESETS["tiny"])
    torch.manual_seed(SEED)
    model.init()
    return DistributedDataParallel(model)


def run(kind: str) -> dict[str, Any]:
    """Rank task: the loss of each step, averaged over the ranks, and the parameters in the end."""
    model = {"sharded": sharded, "ddp": copied}[kind]()
    optimizer = train_lm.make_optimizer(model)
    text = read_text(str(Path(train_lm.__file__).parent), 32)
    losses = []
    for step in range(NUM_STEPS):
        rows = own_rows(text.batch(step, seed=SEED, batch_size=8, seq_size=32))
        rate = train_lm.learning_rate(step, NUM_STEPS, 0.003)
        losses.append(mean_over_ranks(train_lm.train_step(model, optimizer, rows, rate)))
    wholes = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {"losses": torch.tensor(losses), "parameters": torch.cat([whole.detach().flatten() for whole in wholes])}


@pytest.fixture(scope="module")
def of_fully_shard(rank_pool: RankPool) -> dict[str, Any]:
    """What rank 0 saw; the others saw the same."""
    first, *others = rank_pool.run(NUM_RANKS, run, {"kind": "sharded"})
    for other in others:
        assert torch.equal(first["losses"], other["losses"])
        assert torch.equal(first["parameters"], other["parameters"])
    assert first["losses"][-1] < first["losses"][0] - 1.5
    return first


def test_the_curve_is_that_of_ddp(rank_pool: RankPool, of_fully_shard: dict[str, Any]) -> None:
    for of_ddp in rank_pool.run(NUM_RANKS, run, {"kind": "ddp"}):
        torch.testing.assert_close(of_fully_shard["losses"], of_ddp["losses"], rtol=0, atol=1e-5)
        torch.testing.assert_close(of_fully_shard["parameters"], of_ddp["parameters"], rtol=1e-3, atol=1e-4)


def test_another_run_is_the_same_to_the_bit(rank_pool: RankPool, of_fully_shard: dict[str, Any]) -> None:
    for again in rank_pool.run(NUM_RANKS, run, {"kind": "sharded"}):
        assert torch.equal(of_fully_shard["losses"], again["losses"])
        assert torch.equal(of_fully_shard["parameters"], again["parameters"])
