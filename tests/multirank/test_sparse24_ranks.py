"""2:4 sparse weights over ranks: sharded, cut, and both, trained as one process trains them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import DTensor, Shard
from disttrain.errors import ShardingError
from disttrain.fsdp2 import fully_shard
from disttrain.kernels import Sparse24, use_sparse24
from disttrain.testing.pytest_plugin import on_ranks
from disttrain.tp import ColwiseParallel, RowwiseParallel, parallelize_module


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 7), nn.Linear(7, 3))
    use_sparse24(model, report=lambda _: None)
    return model


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("is_cut", [False, True])
def test_training_is_that_of_one_process(is_cut: bool) -> None:
    num_ranks, rank = disttrain.get_world_size(), disttrain.get_rank()
    if is_cut and num_ranks == 3:
        return
    num_tp = 2 if is_cut else 1
    whole = model_of()
    model = copy.deepcopy(whole)
    mesh = disttrain.init_device_mesh("cpu", (num_ranks // num_tp, num_tp), mesh_dim_names=("dp", "tp"))
    if is_cut:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if num_ranks > num_tp:
        fully_shard(model, mesh=mesh["dp"])
    optimizers = []
    for one in (model, whole):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.05)
        Sparse24(one, optimizer, every=2, decay=0.01)
        optimizers.append(optimizer)
    num_parts = num_ranks // num_tp
    for step in range(5):
        x = torch.randn(4 * num_parts, 8, generator=torch.Generator().manual_seed(step))
        model(x.chunk(num_parts)[rank // num_tp]).square().mean().backward()
        whole(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        found = one.full_tensor() if isinstance(one, DTensor) else one
        torch.testing.assert_close(found, other, atol=1e-5, rtol=1e-4)
    dense = optimizers[0].state[model[0].weight]["dense24"]
    wished = optimizers[1].state[whole[0].weight]["dense24"]
    torch.testing.assert_close(dense.full_tensor(), wished, atol=1e-5, rtol=1e-4)


@on_ranks(2)
def test_groups_of_four_are_not_cut() -> None:
    model = model_of()
    fully_shard(model, shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ShardingError, match=r"0.weight lies as .* sparse products take whole weights"):
        Sparse24(model, optimizer, products="sparse")
    Sparse24(model, optimizer)
    odd = nn.Sequential(nn.Linear(12, 8))
    use_sparse24(odd, filter=lambda *_: True, report=lambda _: None)
    fully_shard(odd, shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    with pytest.raises(ShardingError, match=r"0.weight has shape \(8, 12\) .* Cut its inputs into parts"):
        Sparse24(odd, torch.optim.SGD(odd.parameters(), lr=0.1))
