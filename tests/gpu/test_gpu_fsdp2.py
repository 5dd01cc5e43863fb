"""fully_shard on GPUs, judged by a single process on the same GPU."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import DTensor, Replicate, Shard, distribute_tensor
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.testing.pytest_plugin import on_ranks
from tests.gpu.ranks import NUM_GPU_RANKS
from tests.multirank import models


def large_model() -> nn.Module:
    """Large enough for kernels to run when the host is long past them: a missing wait shows as wrong values."""
    return models.TinyModel(vocab=1003, dim=517, hidden=2049, num_blocks=6)


def batch(step: int) -> torch.Tensor:
    rows = 4 * disttrain.get_world_size()
    return models.batch(step, rows=rows, length=256, vocab=1003).to(disttrain.current_world().device)


@on_ranks(NUM_GPU_RANKS)
@pytest.mark.parametrize("meta", [False, True], ids=["initialised", "meta"])
@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_training_equals_a_single_process(meta: bool, reshard: bool | None, kind: str) -> None:
    device, rank, size = disttrain.current_world().device, disttrain.get_rank(), disttrain.get_world_size()
    with torch.device(device):
        reference = large_model()
    nn.Module.train(reference.init(3))
    if meta:
        with torch.device("meta"):
            model = large_model()
    else:
        model = copy.deepcopy(reference)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    if meta:
        model.to_empty(device=device)
        model.init(3)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, **{kind: True}) for m in (model, reference)]
    for step in range(4):
        tokens = batch(step)
        loss = models.loss_of(model, models.own_rows(tokens, rank, size))
        expected = models.loss_of(reference, tokens)
        loss.backward()
        expected.backward()
        total = loss.detach().clone()
        disttrain.all_reduce(total, disttrain.ReduceOp.AVG)
        torch.testing.assert_close(total, expected.detach(), rtol=2e-5, atol=1e-5)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (model, reference)]
        torch.testing.assert_close(norms[0].full_tensor(), norms[1], rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(p, DTensor)
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-2, atol=2e-3)


@on_ranks(NUM_GPU_RANKS)
def test_bf16_training_does_not_grow_and_learns() -> None:
    gc.collect()  # What earlier calls left would go in the middle of this one's steps.
    device = disttrain.current_world().device
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with torch.device("meta"):
        model = large_model()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    model.init(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = batch(0)
    losses, peaks, num_retries = [], [], 0
    for step in range(100):
        if step == 4:
            num_retries = torch.cuda.memory_stats()["num_alloc_retries"]
        torch.cuda.reset_peak_memory_stats()
        loss = models.loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        peaks.append(torch.cuda.max_memory_allocated())
    assert losses[-1] < 0.8 * losses[0]
    assert len(set(peaks[4:])) == 1, peaks
    assert torch.cuda.memory_stats()["num_alloc_retries"] == num_retries


@on_ranks(NUM_GPU_RANKS)
def test_random_values_are_those_of_a_single_process() -> None:
    mesh = disttrain.init_device_mesh("cuda", (disttrain.get_world_size(),))
    for placement in (Shard(0), Replicate()):
        plain = torch.zeros(33, 7, device=disttrain.current_world().device)
        torch.manual_seed(5)
        nn.init.normal_(plain)
        sharded = distribute_tensor(torch.zeros(33, 7), mesh, [placement])
        torch.manual_seed(5)
        nn.init.normal_(sharded)
        assert torch.equal(sharded.full_tensor(), plain)
