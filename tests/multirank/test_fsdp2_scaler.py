"""Gradients scaled for fp16 under `fully_shard`: what is not finite on one rank has all ranks skip the step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import disttrain
from disttrain.dtensor import DTensor
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.testing import RankPool

SCALERS: dict[str, Callable[..., Any]] = {
    "GradScaler": torch.amp.GradScaler,
    # Else it takes the default group that there was when its module was loaded: None, in a script.
    "ShardedGradScaler": partial(ShardedGradScaler, process_group=None),
}
BAD_STEP = 1


def steps(scaler_name: str, dtype: str, *, is_clipped: bool) -> dict[str, list[float]]:
    """Rank task: the scale after each step, and a sum of the parameters. In one step the last rank's loss is inf."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = SCALERS[scaler_name]("cpu", init_scale=128.0)
    rank, last = disttrain.get_rank(), disttrain.get_world_size() - 1
    found: dict[str, list[float]] = {"scale": [], "sum": []}
    for step in range(4):
        loss = model(torch.ones(3, 6) * (rank + 1) / 4).float().square().mean()
        scaler.scale(loss * float("inf") if (step, rank) == (BAD_STEP, last) else loss).backward()
        if is_clipped:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        whole = [parameter.full_tensor() for parameter in model.parameters() if isinstance(parameter, DTensor)]
        found["scale"].append(scaler.get_scale())
        found["sum"].append(torch.cat([value.detach().flatten() for value in whole]).double().sum().item())
    return found


@pytest.mark.parametrize("scaler_name", SCALERS)
@pytest.mark.parametrize(("num_ranks", "dtype", "is_clipped"), [(2, "float16", True), (3, "float32", False)])
def test_all_ranks_skip_a_step_or_none(
    rank_pool: RankPool, scaler_name: str, num_ranks: int, dtype: str, is_clipped: bool
) -> None:
    arguments = {"scaler_name": scaler_name, "dtype": dtype, "is_clipped": is_clipped}
    first, *others = rank_pool.run(num_ranks, steps, arguments)
    assert all(other == first for other in others)
    assert first["scale"] == [128.0, 64.0, 64.0, 64.0]
    sums = first["sum"]
    assert sums[BAD_STEP] == sums[BAD_STEP - 1]
    assert len(set(sums)) == 3
