"""Linear layers in float8 under context parallel: their scales are of each rank's positions, and training goes on."""

from __future__ import annotations

import copy

import pytest
import torch
from llama.config import LlamaConfig
from llama.model import Llama

import disttrain
from disttrain.context_parallel import cut_batch
from disttrain.fsdp2 import fully_shard
from disttrain.kernels import loss_from_head, use_float8
from disttrain.testing.pytest_plugin import on_ranks

VOCAB, NUM_STEPS = 64, 5
CONFIG = LlamaConfig(32, 2, 4, 2, 64, VOCAB, max_length=32)


def losses_of(model: Llama, axis: disttrain.DeviceMesh, tokens: torch.Tensor) -> list[float]:
    """Those of some steps, the mean of the ranks'."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.02), []
    for _ in range(NUM_STEPS):
        batch = cut_batch(axis, tokens)
        optimizer.zero_grad()
        with batch.attention():
            with loss_from_head(model.head, batch.targets):
                loss = model(batch.input_ids)
            # The loss is this rank's mean.
            loss = batch.mean(loss * (batch.targets >= 0).sum())
            loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        disttrain.all_reduce(shown, disttrain.ReduceOp.AVG, group=axis.get_group())
        losses.append(shown.item())
    return losses


@on_ranks(2, 3)
@pytest.mark.parametrize("recomputes", [False, True])
def test_losses_in_float8_are_those_of_one_process_up_to_their_rounding(recomputes: bool) -> None:
    mesh = disttrain.init_device_mesh("cpu", (disttrain.get_world_size(), 1), mesh_dim_names=("cp", "one"))
    torch.manual_seed(0)
    plain = Llama(CONFIG)
    plain.recomputes = recomputes
    tokens = torch.randint(VOCAB, (2, 23), generator=torch.Generator().manual_seed(0))
    exact = losses_of(copy.deepcopy(plain), mesh["one"], tokens)
    found = []
    for axis in (mesh["one"], mesh["cp"]):
        model = copy.deepcopy(plain)
        use_float8(model, report=lambda _: None)
        for block in model.blocks:
            fully_shard(block, mesh=axis)
        fully_shard(model, mesh=axis)
        found.append(losses_of(model, axis, tokens))
    whole, cut = found
    assert cut[-1] < 0.95 * cut[0]
    # As far from each other as float8 is from fp32, or nearer.
    for a, b, c in zip(whole, cut, exact, strict=True):
        assert b == pytest.approx(a, rel=0.02)
        assert b == pytest.approx(c, rel=0.02)
