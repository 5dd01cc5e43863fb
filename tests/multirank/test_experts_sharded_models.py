"""Models of transformers with experts over ranks, sharded, cut and checkpointed, train like one process of their own
modules in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain import kernels
from disttrain.dtensor import DTensor
from disttrain.experts import shard_experts
from disttrain.fsdp2 import fully_shard
from disttrain.mesh import DeviceMesh
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.expert_transformers import expert_model, loss_of, sentences, with_our_experts


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_trains_alike(
    model: nn.Module,
    whole: nn.Module,
    position: tuple[int, int],
    make: Callable[..., Any] = torch.optim.AdamW,
    num_steps: int = 3,
) -> None:
    """Losses, gradients, norms and parameters; `position`: of this rank's batch, among how many."""
    index, count = position
    mine, theirs = make(model.parameters(), lr=0.02), make(whole.parameters(), lr=0.02)
    for step in range(num_steps):
        tokens = sentences(step)
        loss, expected = loss_of(model, tokens.chunk(count)[index]), loss_of(whole, tokens)
        loss.backward()
        expected.backward()
        sum_of_losses = loss.detach().clone()
        disttrain.all_reduce(sum_of_losses)
        torch.testing.assert_close(sum_of_losses / disttrain.get_world_size(), expected.detach())
        for (name, parameter), (_, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            torch.testing.assert_close(full(parameter.grad), other.grad, msg=lambda text, at=name: f"{at}: {text}")
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (model, whole)]
        torch.testing.assert_close(full(norms[0]), norms[1])
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for (name, parameter), (_, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        torch.testing.assert_close(full(parameter.data), other.data, msg=lambda text, at=name: f"{at}: {text}")


def sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    data = mesh["dp", "ep"]._flatten("fsdp")
    for block in model.model.layers:
        fully_shard(block, mesh=data, **options)
    return fully_shard(model, mesh=data, **options)


@on_ranks(4)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (1, 4)], ids=str)
def test_sharded_experts_train_like_one_process(name: str, shape: tuple[int, int]) -> None:
    mesh = disttrain.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
    whole = expert_model(name, 5)
    model = with_our_experts(copy.deepcopy(whole))
    shard_experts(model, mesh["ep"])
    assert_trains_alike(sharded(model, mesh), whole, (disttrain.get_rank(), 4))


@on_ranks(3)
def test_experts_over_three_ranks() -> None:
    mesh = disttrain.init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "ep"))
    whole = expert_model("qwen3_moe", 4)
    model = with_our_experts(copy.deepcopy(whole))
    shard_experts(model, mesh["ep"])
    sharded(model, mesh)
    # The last rank has none of the four.
    assert model.model.layers[0].mlp.experts.down_proj.to_local().numel() == (0 if disttrain.get_rank() == 2 else 256)
    tokens = sentences(0, num=6)
    loss_of(model, tokens.chunk(3)[disttrain.get_rank()]).backward()
    loss_of(whole, tokens).backward()
    for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full(parameter.grad), other.grad)
