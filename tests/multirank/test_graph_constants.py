"""Meshes, their groups and placements in compiled graphs: constants there, and themselves again when they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from disttrain.process_group import World, entered_world
from disttrain.process_group import functional as F
from disttrain.store import HashStore
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.shardings import mesh_of, normal

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo hides constants in objects of its own")


@contextmanager
def alone(world_size: int) -> Iterator[None]:
    """One rank of a job whose others are not there: collectives return at once, with this rank's own values."""
    world = World(HashStore(), 0, world_size, backend="fake", timeout_s=1.0, device=torch.device("cpu"))
    with entered_world(world):
        yield


class Keeper(nn.Module):
    """Keeps what it learns of a DTensor that the graph makes, and returns it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None
        self.make: Callable[[torch.Tensor], DTensor] | None = None

    def forward(self, x: DTensor) -> Any:
        y = x * 2
        if self.make is None:
            self.make = partial(DTensor.from_local, device_mesh=y.device_mesh, placements=y.placements)
        self.kept = {"mesh": y.device_mesh, "placement": [y.placements[0], Partial("avg")], y.placements[0]: 1}
        return self.make(y.to_local().sin()), y.device_mesh, y.placements


@pytest.mark.sweep(1)
@on_ranks(1, timeout_s=360)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_meshes_and_placements_leave_a_graph_as_they_are(backend: str) -> None:
    with alone(2):
        torch._dynamo.reset()
        mesh = mesh_of((2,))
        module = Keeper()
        module.compile(backend=backend, fullgraph=True)
        for num_rows in (4, 6, 4):  # the second call has a guard for what the first one has kept
            x = distribute_tensor(normal(num_rows, 6), mesh, [Shard(0)]).requires_grad_()
            result, of_mesh, placements = module(x)
            result.sum().backward()
            assert of_mesh is mesh
            assert placements == (Shard(0),)
            assert module.kept == {"mesh": mesh, "placement": [Shard(0), Partial("avg")], Shard(0): 1}
            torch.testing.assert_close(result.to_local(), (x.to_local() * 2).sin())
            torch.testing.assert_close(x.grad.to_local(), (x.to_local() * 2).cos() * 2)


def summed(x: DTensor) -> torch.Tensor:
    """By the group of a mesh that the graph comes to, and by one that it cuts out of that."""
    y = x * 2
    group = y.device_mesh.get_group("axis1")
    return F.all_reduce(y.to_local(), "sum", group) + F.all_gather_tensor(
        y.to_local(), 0, y.device_mesh["axis0"].get_group()
    )


@on_ranks(2, timeout_s=360)
def test_a_graph_finds_the_groups_of_its_meshes() -> None:
    torch._dynamo.reset()
    mesh = mesh_of((1, 2))
    compiled = torch.compile(summed, backend="aot_eager", fullgraph=True)
    for num_rows in (4, 6):
        x = DTensor.from_local(normal(num_rows, 2, seed=disttrain.get_rank()), mesh, [Replicate(), Shard(0)])
        torch.testing.assert_close(compiled(x), F.wait_tensor(summed(x)))
