"""Modules of DTensors: what they keep between steps, how they are saved, copied and shown."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    implicit_replication,
)
from disttrain.errors import CollectiveMismatchError, LayoutError
from disttrain.mesh import DeviceMesh
from disttrain.testing import run_threads
from tests.cases.shardings import collectives_of, laid_out, mesh_of, normal


def cut_all(placement: Placement) -> Callable[[str, nn.Module, DeviceMesh], None]:
    """Lays out every parameter and buffer that has dims, along all axes."""

    def partition(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            placements = [placement if tensor.ndim else Replicate()] * mesh.ndim
            whole = distribute_tensor(tensor.detach(), mesh, placements, src_data_rank=None)
            if isinstance(tensor, nn.Parameter):
                module.register_parameter(name, nn.Parameter(whole))
            else:
                module.register_buffer(name, whole)

    return partition


def seeded(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed))
    return module.double()


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (4,), (2, 2), (1, 3)])
def test_running_statistics_are_those_of_the_whole_batch(mesh_shape: tuple[int, ...], momentum: float | None) -> None:
    steps = [normal(5, 3, 2, seed=seed) for seed in range(3)]

    def body() -> None:
        mesh = mesh_of(mesh_shape)
        for statistics in (Replicate(), Shard(0)):
            plain = seeded(nn.BatchNorm1d(3, momentum=momentum))
            module = copy.deepcopy(plain)
            distribute_module(module, mesh, cut_all(statistics))
            for images in steps:
                batch = distribute_tensor(images, mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)
                torch.testing.assert_close(module(batch).full_tensor(), plain(images))
            for name, wanted in plain.state_dict().items():
                found = module.get_buffer(name) if "running" in name or "num" in name else module.get_parameter(name)
                assert isinstance(found, DTensor)
                assert found.placements == (statistics if wanted.ndim else Replicate(),) * mesh.ndim
                torch.testing.assert_close(found.full_tensor(), wanted)
            torch.testing.assert_close(module.eval()(batch).full_tensor(), plain.eval()(images))

    run_threads(torch.Size(mesh_shape).numel(), body)


def test_states_are_loaded_in_place_by_assignment_and_from_wholes() -> None:
    def body() -> None:
        mesh = mesh_of((3,))
        plain = seeded(nn.Linear(3, 4))
        whole = plain.state_dict()
        module = nn.Linear(3, 4).double()
        distribute_module(module, mesh, cut_all(Shard(0)))
        part = module.weight.to_local()
        with pytest.raises(RuntimeError, match=r"meets a plain tensor.*implicit_replication\(\)"):
            module.load_state_dict(whole)
        with implicit_replication():
            module.load_state_dict(whole)
        assert module.weight.to_local().data_ptr() == part.data_ptr()
        with pytest.raises(RuntimeError, match="meets a plain tensor"):
            plain.load_state_dict(module.state_dict())
        on_meta = nn.Linear(3, 4, device="meta")
        on_meta.load_state_dict(module.state_dict(), assign=True)
        other = nn.Linear(3, 4).double()
        distribute_module(other, mesh, cut_all(Replicate()))
        other.load_state_dict(module.state_dict())
        twin = copy.deepcopy(module)
        for one in (module, on_meta, other, twin):
            for name, wanted in whole.items():
                torch.testing.assert_close(one.get_parameter(name).full_tensor(), wanted)
        with torch.no_grad():
            twin.weight.zero_()
        assert module.weight.full_tensor().any()
        assert twin.weight.requires_grad

    run_threads(3, body)


def test_an_optimizers_state_is_saved_and_loaded() -> None:
    def body() -> None:
        mesh = mesh_of((2,))
        module = seeded(nn.Linear(3, 5))
        distribute_module(module, mesh, cut_all(Shard(0)))
        x = distribute_tensor(normal(4, 3), mesh, [Shard(0)], src_data_rank=None)
        optimizer = torch.optim.AdamW(module.parameters())
        module(x).square().sum().backward()
        optimizer.step()
        twin = copy.deepcopy(module)
        other = torch.optim.AdamW(twin.parameters())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for one, its in ((module, optimizer), (twin, other)):
            one.zero_grad()
            one(x).square().sum().backward()
            its.step()
        torch.testing.assert_close(twin.weight.full_tensor(), module.weight.full_tensor())
        assert other.state[twin.weight]["exp_avg"].placements == (Shard(0),)

    run_threads(2, body)


def test_copies() -> None:
    def body() -> None:
        parameter = nn.Parameter(laid_out(normal(5, 3), mesh_of((2,)), [Shard(0)]))
        shallow, deep = copy.copy(parameter), copy.deepcopy(parameter)
        for one in (shallow, deep):
            assert isinstance(one, nn.Parameter)
            assert isinstance(one, DTensor)
            assert (one.requires_grad, one.is_leaf, one.placements) == (True, True, (Shard(0),))
        with torch.no_grad():
            parameter.zero_()
        assert not shallow.full_tensor().any()
        torch.testing.assert_close(deep.full_tensor(), normal(5, 3))

    run_threads(2, body)


def test_pickling_is_refused() -> None:
    def body() -> None:
        tensor = laid_out(normal(5, 3), mesh_of((2,)), [Shard(0)])
        for dump in (pickle.dumps, lambda value: torch.save(value, io.BytesIO())):
            for value in (tensor, {"weight": [tensor]}, nn.ParameterList([nn.Parameter(tensor)])):
                with pytest.raises(LayoutError, match=r"pickle: .*disttrain\.checkpoint"):
                    dump(value)

    run_threads(2, body)


def test_printing_shows_the_whole_and_repr_the_part() -> None:
    def body() -> tuple[Any, ...]:
        mesh = disttrain.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        rows = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)], src_data_rank=None)
        total = DTensor.from_local(torch.tensor(disttrain.get_rank() + 1.0), mesh, [Partial()])
        shown: list[str] = []
        assert collectives_of(lambda: shown.extend([repr(rows), repr([total]), repr(nn.Parameter(rows))])) == []
        return str(rows), f"{total:.2f} {total} {rows}", str(rows.requires_grad_()), shown

    results = run_threads(2, body)
    text = "DTensor(tensor([[0., 1.],\n                [2., 3.],\n                [4., 5.]]), [Shard(0)] on dp=2)"
    assert [result[:3] for result in results] == [(text, f"3.00 3.0 {text}", text)] * 2
    assert results[1][3][:2] == [
        "DTensor(local=tensor([[4., 5.]]), shape=(3, 2), [Shard(0)] on dp=2)",
        "[DTensor(local=tensor(2.), shape=(), [Partial(sum)] on dp=2)]",
    ]


def test_one_rank_that_prints_alone_is_told_what_to_do() -> None:
    def body() -> None:
        rows = laid_out(torch.arange(6.0).view(3, 2), mesh_of((2,)), [Shard(0)])
        if disttrain.get_rank() == 0:
            with pytest.raises(CollectiveMismatchError) as caught:
                str(rows)
            assert caught.value.__notes__ == [
                "str() of a DTensor is the whole, and collective; print(repr(x)) where one rank prints."
            ]

    run_threads(2, body)


def test_gradients_of_parameters_lie_as_the_parameters_do() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2, 2))
        alone = nn.Linear(4, 4)
        with torch.no_grad():
            alone.weight.copy_(torch.linspace(-1, 1, 16).view(4, 4))
            alone.bias.copy_(torch.linspace(0, 1, 4))
        together = distribute_module(copy.deepcopy(alone), mesh)
        x = torch.arange(16.0).view(4, 4)
        rows = distribute_tensor(x, mesh, [Shard(0), Shard(0)])
        for model in (together, copy.deepcopy(together)):
            alone.zero_grad()
            for _ in range(2):
                model(rows).square().mean().backward()
                alone(x).square().mean().backward()
            for parameter, wanted in zip(model.parameters(), alone.parameters(), strict=True):
                grad: Any = parameter.grad
                assert grad.placements == (Replicate(), Replicate())
                torch.testing.assert_close(grad.full_tensor(), wanted.grad)
            assert collectives_of(lambda model=model: nn.utils.clip_grad_norm_(model.parameters(), 1.0)) == []

    run_threads(4, body)
