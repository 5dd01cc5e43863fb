"""What a model cut one way has saved, a model cut another way, or whole, loads: parameters and optimizer's state."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn

import disttrain
from disttrain.checkpoint import load, save, set_training_state, training_state
from disttrain.dtensor import DTensor
from disttrain.fsdp2 import fully_shard
from disttrain.mesh import DeviceMesh
from disttrain.testing import run_threads
from disttrain.tp import parallelize_module
from tests.cases.tensor_parallel import Decoder, decoder_plan

TOKENS = torch.arange(32).view(4, 8) % 16


def make(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(tied=True).double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor = TOKENS) -> None:
    nn.functional.cross_entropy(model(rows).flatten(0, 1), rows.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def test_saved_on_two_axes_and_loaded_on_one_and_on_none(tmp_path: Path) -> None:
    """Two steps: the first before the save, on two by two ranks, the second after each of the loads."""
    alone = make()
    path = tmp_path / "first"
    reference = copy.deepcopy(alone)
    expected_optimizer = adam(reference)

    def save_from_two_axes() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(copy.deepcopy(alone), mesh["tp"], decoder_plan(2, sequence=True))
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        optimizer = adam(model)
        step(model, optimizer, TOKENS.chunk(2)[mesh["dp"].get_local_rank()])
        save(training_state(model, optimizer), path)

    run_threads(4, save_from_two_axes)
    for _ in range(2):
        step(reference, expected_optimizer)

    def continue_with(model: nn.Module) -> None:
        optimizer = adam(model)
        state = training_state(model, optimizer)
        load(state, path)
        set_training_state(model, optimizer, state)
        step(model, optimizer)
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(whole(model.state_dict()[name]), value)
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            for key, value in expected_optimizer.state[other].items():
                torch.testing.assert_close(whole(optimizer.state[one][key]), value)

    def on_one_axis() -> None:
        mesh: DeviceMesh = disttrain.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        continue_with(parallelize_module(make(1), mesh, decoder_plan(2, sequence=False)))

    run_threads(4, on_one_axis)
    continue_with(make(2))
