"""Models in training: pipelines and sharded modules, with a rank that goes wrong where `fault` says so."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import disttrain
from disttrain.fsdp2 import fully_shard
from disttrain.pipelining import PipelineStage, make_schedule
from disttrain.pipelining.runtime.schedule_runtime import PipelineSchedule
from tests.flight_corpus.tensors import device, ones

NUM_MICROBATCHES = 4
DIM = 8

Hook = Callable[[int], None]


class Layer(nn.Module):
    """Calls `hook` with the number of the pass before it computes."""

    def __init__(self, hook: Hook | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self._hook = hook
        self._num_passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._num_passes += 1
        if self._hook is not None:
            self._hook(self._num_passes)
        return x + torch.tanh(self.linear(x))


def pipeline(
    rank: int,
    num_ranks: int,
    *,
    name: str = "1F1B",
    num_steps: int = 1,
    hook: Hook | None = None,
) -> None:
    """Train a pipeline of one stage per rank; `hook` is in this rank's."""
    schedule = make_schedule(name, num_ranks, NUM_MICROBATCHES, 1)
    stage = PipelineStage(Layer(hook).to(device()), rank, num_ranks, device())
    runner = PipelineSchedule(stage, schedule, F.mse_loss)
    for _ in range(num_steps):
        runner.step(*([ones(8, DIM)] if rank == 0 else []), target=0 * ones(8, DIM))


def by_hand(rank: int, num_ranks: int, actions: str) -> None:
    """A pipeline as one writes it without disttrain's: `F2` takes from the stage before and gives to the next."""
    world = disttrain.current_world()
    sent = []
    for action in actions.split():
        kind, microbatch = action[0], int(action[1:])
        world.action = f"stage {rank} microbatch {microbatch} {kind}"
        source, target = (rank - 1, rank + 1) if kind == "F" else (rank + 1, rank - 1)
        if 0 <= source < num_ranks:
            disttrain.recv(ones(DIM), source)
        if 0 <= target < num_ranks:
            sent.append(disttrain.isend(ones(DIM), target))
    for work in sent:
        assert work is not None
        work.wait()
    world.action = ""
    disttrain.barrier()


def sharded(rank: int, num_steps: int, *, skips: bool = False, hook: Hook | None = None) -> None:
    """Train layers of different sizes that are sharded over all ranks; `skips`: this rank leaves out the second."""
    torch.manual_seed(0)
    layers = nn.ModuleList([Layer(), Layer(hook), Layer()]).to(device())
    wide = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)).to(device())
    for layer in (*layers, wide):
        fully_shard(layer)
    optimizer = torch.optim.SGD([*layers.parameters(), *wide.parameters()], lr=0.1)
    for number in range(num_steps):
        x = ones(2, DIM) * rank
        for place, layer in enumerate((layers[0], wide, layers[1], layers[2])):
            if not (skips and number == num_steps - 1 and place == 1):
                x = layer(x)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def meshed(num_steps: int, before: Callable[[disttrain.DeviceMesh, int], None] | None = None) -> None:
    """Steps on a mesh of 2 x 2: an all_reduce along each axis; `before` each step something may happen."""
    mesh = disttrain.init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    for number in range(num_steps):
        if before is not None:
            before(mesh, number)
        disttrain.all_reduce(ones(4), group=mesh["tp"].get_group())
        disttrain.all_reduce(ones(4), group=mesh["dp"].get_group())
