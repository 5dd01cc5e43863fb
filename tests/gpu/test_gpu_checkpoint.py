"""Checkpoints of what lies on GPUs: training goes on bit by bit, on each kind of AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain.checkpoint import (
    Checkpointer,
    RngState,
    StateDictOptions,
    get_state_dict,
    set_state_dict,
    set_training_state,
    training_state,
)
from disttrain.dtensor import DTensor
from disttrain.fsdp2 import fully_shard
from disttrain.testing import RankPool
from tests.gpu.ranks import NUM_GPU_RANKS


def sharded_model(seed: int, options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(513, 1027), nn.Dropout(0.1), nn.Linear(1027, 7)).to(
        disttrain.current_world().device
    )
    fully_shard(model)
    return model, torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(0.01) if "capturable" in options else 0.01, **options
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        rows = torch.randn(16, 513, generator=torch.Generator().manual_seed(step)).to(disttrain.current_world().device)
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """This rank's part of all parameters and moments."""
    found = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().cpu()
        for name, tensor in found.items()
    }


def save_training(directory: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    model, optimizer = sharded_model(1, options)
    train(model, optimizer, range(3))
    Checkpointer(directory).save(3, {**training_state(model, optimizer), "rng": RngState()})
    train(model, optimizer, range(3, 5))
    return everything(model, optimizer)


def resume_training(directory: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    model, optimizer = sharded_model(2, options)
    state = {**training_state(model, optimizer), "rng": RngState()}
    assert Checkpointer(directory).load(state) == 3
    set_training_state(model, optimizer, state)
    train(model, optimizer, range(3, 5))
    return everything(model, optimizer)


@pytest.mark.parametrize("option", ["foreach", "fused", "capturable"])
def test_training_on_gpus_goes_on_bit_by_bit(rank_pool: RankPool, tmp_path: Any, option: str) -> None:
    """Dropout draws from the GPU's generator, so that is resumed too."""
    arguments = {"directory": str(tmp_path), "options": {option: True}}
    undisturbed = rank_pool.run(NUM_GPU_RANKS, save_training, arguments)
    resumed = rank_pool.run(NUM_GPU_RANKS, resume_training, arguments)
    for before, after in zip(undisturbed, resumed, strict=True):
        assert set(before) == set(after)
        assert [name for name in before if not before[name].equal(after[name])] == []


def hand_over_state_dicts(options: dict[str, Any]) -> None:
    """On the CPU, whole on rank 0 alone, and back from there to the GPUs."""
    model, optimizer = sharded_model(1, options)
    train(model, optimizer, range(2))
    expected = everything(model, optimizer)
    offloaded, _ = get_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))
    assert {tensor.to_local().device.type for tensor in offloaded.values()} == {"cpu"}
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=whole)
    assert bool(model_state) == bool(optimizer_state) == (disttrain.get_rank() == 0)
    assert {tensor.device.type for tensor in model_state.values()} <= {"cpu"}
    other, other_optimizer = sharded_model(2, options)
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    found = everything(other, other_optimizer)
    assert set(found) == set(expected)
    assert [name for name in expected if not expected[name].equal(found[name])] == []
    train(other, other_optimizer, range(2, 3))


@pytest.mark.parametrize("option", ["foreach", "fused", "capturable"])
def test_state_dicts_leave_gpus_and_come_back(rank_pool: RankPool, option: str) -> None:
    rank_pool.run(NUM_GPU_RANKS, hand_over_state_dicts, {"options": {option: True}})
