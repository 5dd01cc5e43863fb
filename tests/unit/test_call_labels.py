"""What a call is for: the world's action and module reach observers and errors, fsdp2 and meshes say theirs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import disttrain
from disttrain import init_device_mesh
from disttrain.errors import DisttrainError
from disttrain.fsdp2 import fully_shard
from disttrain.process_group import Call, World, entered_world
from disttrain.store import HashStore
from disttrain.testing import run_threads


class Labels:
    """Keeps what each call was for."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []

    def enqueued(self, call: Call) -> None:
        self.seen.append((call.operation, call.action, call.module))

    def completed(self, call: Call, error: DisttrainError | None) -> None:
        """Of no interest here."""


def _fake_world(world_size: int = 4) -> World:
    return World(HashStore(), 0, world_size, backend="fake", timeout_s=1.0, device=torch.device("cpu"))


def test_calls_carry_what_the_world_says_at_that_moment() -> None:
    with entered_world(_fake_world()) as world:
        labels = Labels()
        world.add_observer(labels)
        disttrain.barrier()
        world.action, world.module = "stage 1 microbatch 3 F", "layers.0"
        disttrain.barrier()
    assert labels.seen == [("barrier", "", ""), ("barrier", "stage 1 microbatch 3 F", "layers.0")]


def test_an_error_says_what_the_call_was_for() -> None:
    with entered_world(_fake_world()) as world:
        call = Call("barrier", world.default_group, 1, (), (), action="stage 1 microbatch 3 F", module="layers.0")
        text = str(call.failure(RuntimeError("connection closed")))
    assert "sequence 1, stage 1 microbatch 3 F, layers.0" in text


def test_gathers_and_reductions_say_their_module() -> None:
    def work() -> list[tuple[str, str, str]]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        world = disttrain.current_world()
        labels = Labels()
        world.add_observer(labels)
        model(torch.ones(2, 4)).sum().backward()
        assert (world.action, world.module) == ("", "")
        assert mesh.get_group().axis_name == "dp"
        return labels.seen

    for seen in run_threads(2, work):
        gathers = [module for operation, _, module in seen if operation == "all_gather_into_tensor"]
        reductions = [module for operation, _, module in seen if operation == "reduce_scatter_tensor"]
        assert gathers[:2] == ["0", "1"]
        assert set(gathers) == {"0", "1"}
        assert reductions == ["1", "0"]


@pytest.mark.parametrize(("axes", "name"), [((0,), "dp"), ((1,), "tp"), ((0, 1), "")])
def test_a_group_knows_its_first_axis(axes: tuple[int, ...], name: str) -> None:
    with entered_world(_fake_world(8)):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "tp", "pp"))
        assert mesh.group_along(axes).axis_name == (name or "dp+tp")
        again = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        assert again.group_along(axes).axis_name == (name or "dp+tp")
        assert init_device_mesh("cpu", (8,)).get_group().axis_name == ""
