"""Asynchronous saves of what lies on GPUs: the values are those at the call, whatever the next step does to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain.checkpoint import Checkpointer, training_state
from disttrain.dtensor import DTensor
from disttrain.fsdp2 import fully_shard
from disttrain.testing import RankPool
from tests.gpu.ranks import NUM_GPU_RANKS

WIDTH = 4096
NUM_STEPS = 6
LIMIT_S = 60.0


def sharded_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.BatchNorm1d(WIDTH))
    model.to(disttrain.current_world().device)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    device = disttrain.current_world().device
    rows = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    optimizer.step()


def on_host(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of all tensors, by name."""
    found = dict(state["model"])
    for name, entry in state["optimizer"].items():
        found |= {f"{name}/{key}": value for key, value in entry["state"].items()}
    return {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()
        for name, tensor in found.items()
    }


def save_each_step(directory: str, names_optimizers: bool) -> list[str]:
    """Names of what was saved with other values than it had at the call."""
    model, optimizer = sharded_model()
    one_step(model, optimizer, 0)
    expected, pending = {}, []
    with Checkpointer(directory, keep=None) as checkpointer:
        for step in range(1, NUM_STEPS):
            state = training_state(model, optimizer)
            expected[step] = on_host(state)
            # Much to do on the GPU before the copies can begin, and a step that changes everything right after.
            product = torch.randn(WIDTH, WIDTH, device=disttrain.current_world().device)
            for _ in range(50):
                product = product @ product / WIDTH
            pending.append(checkpointer.async_save(step, state, optimizer if names_optimizers else ()))
            one_step(model, optimizer, step)
        assert [save.result(LIMIT_S) is not None for save in pending] == [True] * (NUM_STEPS - 1)
    wrong = []
    for step, values in expected.items():
        state = training_state(model, optimizer)
        checkpointer.load(state, step)
        found = on_host(state)
        wrong += [f"step {step}: {name}" for name in values if not values[name].equal(found[name])]
    return wrong


@pytest.mark.parametrize("names_optimizers", [True, False])
def test_values_are_those_at_the_call(rank_pool: RankPool, tmp_path: Path, names_optimizers: bool) -> None:
    """The first two saves copy on the GPU while memory is being pinned, later ones go straight to it."""
    arguments = {"directory": str(tmp_path), "names_optimizers": names_optimizers}
    assert rank_pool.run(NUM_GPU_RANKS, save_each_step, arguments) == [[]] * NUM_GPU_RANKS


def save_plain(directory: str) -> bool:
    """Tensors without an optimizer, one of them laid out apart, overwritten on the current stream at once."""
    device = disttrain.current_world().device
    state = {"w": torch.zeros(WIDTH, WIDTH, device=device), "apart": torch.zeros(WIDTH, 64, device=device).t()}
    with Checkpointer(directory, keep=None) as checkpointer:
        for step in range(1, NUM_STEPS):
            for tensor in state.values():
                tensor.fill_(step)
            pending = checkpointer.async_save(step, state)
            for tensor in state.values():
                tensor.fill_(-1)
            pending.staged.result(LIMIT_S)
    for step in range(1, NUM_STEPS):
        checkpointer.load(state, step)
        if not all(bool(tensor.eq(step).all()) for tensor in state.values()):
            return False
    return True


def test_what_no_optimizer_owns_is_safe_at_once(rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(NUM_GPU_RANKS, save_plain, {"directory": str(tmp_path)}) == [True] * NUM_GPU_RANKS
