"""torch.amp.GradScaler with DTensors: what it multiplies are parts, and all ranks skip a step, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import CommDebugMode, DTensor, Partial, Replicate, Shard, distribute_tensor
from disttrain.fsdp2 import fully_shard
from disttrain.testing import run_threads
from tests.cases.dtensors import laid
from tests.cases.shardings import mesh_of, normal

SCALE = torch.tensor(1 / 8)


def unscale(grads: Sequence[torch.Tensor], scale: torch.Tensor = SCALE) -> float:
    """What `found_inf` is afterwards."""
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(list(grads), found, scale)
    return found.item()


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (1, 2), (2, 2)])
def test_lists_of_all_layouts(mesh_shape: tuple[int, ...]) -> None:
    def body() -> None:
        mesh = mesh_of(mesh_shape)
        other = disttrain.init_device_mesh("cpu", (mesh.size(),))
        for placement in (Shard(0), Shard(1), Replicate(), Partial(), Partial("avg"), Partial("max")):
            whole = normal(5, 3, dtype=torch.float32)
            grads = [
                torch.ones(3),
                laid(whole, mesh, [placement] * mesh.ndim),
                laid(whole, mesh, [Shard(0)] * mesh.ndim),
                distribute_tensor(whole, other, [Shard(1)], src_data_rank=None),
                laid(whole[:1], mesh, [Shard(0)] * mesh.ndim),  # some ranks have nothing
            ]
            assert unscale(grads) == 0.0
            for grad in grads[1:4]:
                assert isinstance(grad, DTensor)
                torch.testing.assert_close(grad.full_tensor(), whole / 8)
            assert torch.equal(grads[0], torch.full((3,), 1 / 8))

    run_threads(torch.Size(mesh_shape).numel(), body)


@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")])
def test_what_one_rank_has_all_are_told(odd: float) -> None:
    def body() -> list[float]:
        rank, mesh = disttrain.get_rank(), mesh_of((2, 2))
        found = []
        for odd_rank in range(4):
            part = torch.full((2, 2), odd if rank == odd_rank else 1.0)
            found += [
                unscale([torch.ones(2), DTensor.from_local(part.clone(), mesh, placements)])
                for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Partial(), Shard(0)])
            ]
            # Of a plain one, too, and through a smaller mesh within a larger one.
            row = mesh["axis1"]
            found.append(unscale([part.clone(), DTensor.from_local(torch.ones(2), mesh, [Shard(0), Replicate()])]))
            in_row = DTensor.from_local(part.clone(), row, [Shard(0)])
            found.append(unscale([DTensor.from_local(torch.ones(2), mesh, [Shard(0), Shard(0)]), in_row]))
        return found

    assert run_threads(4, body) == [[1.0] * 20] * 4


def test_a_sum_that_does_not_fit_is_found() -> None:
    def body() -> None:
        mesh = mesh_of((2,))
        largest = torch.full((2,), torch.finfo(torch.float32).max)
        assert unscale([DTensor.from_local(largest.clone(), mesh, [Partial()])]) == 1.0
        assert unscale([DTensor.from_local(largest * (1 - 2 * disttrain.get_rank()), mesh, [Partial()])]) == 0.0
        found = distribute_tensor(torch.zeros(()), mesh, [Replicate()], src_data_rank=None)
        scale = distribute_tensor(SCALE, mesh, [Replicate()], src_data_rank=None)
        part = torch.full((1,), float("inf") if disttrain.get_rank() else 8.0)
        grad = DTensor.from_local(part, mesh, [Shard(0)])
        torch._amp_foreach_non_finite_check_and_unscale_([grad], found, scale)
        assert found.full_tensor().item() == 1.0
        assert grad.full_tensor().tolist() == [1.0, float("inf")]

    run_threads(2, body)


def a_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=place))
    return model


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, odd_rank: int | None) -> list[float]:
    """The scales after each of four steps; in the second one, one rank's part of one gradient is infinite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    scales = []
    for step in range(4):
        scaler.scale(model(normal(4, 6, dtype=torch.float32)).square().sum()).backward()
        grad: Any = next(model.parameters()).grad
        if step == 1 and odd_rank is not None and disttrain.get_rank() == odd_rank:
            getattr(grad, "_local_tensor", grad)[0] = float("inf")
        elif step == 1 and odd_rank is None:
            grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_a_sharded_model_takes_and_skips_the_steps_of_a_plain_one(options: dict[str, bool]) -> None:
    plain = a_model()
    scales = trained(plain, torch.optim.Adam(plain.parameters(), lr=0.1, **options), None)
    assert scales == [128.0, 64.0, 128.0, 256.0]

    def body(odd_rank: int) -> list[float]:
        model = fully_shard(a_model())
        found = trained(model, torch.optim.Adam(model.parameters(), lr=0.1, **options), odd_rank)
        for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.full_tensor(), wanted.detach())
        return found

    for odd_rank in (0, 1):
        assert run_threads(2, body, odd_rank) == [scales, scales]


def test_no_gradient_is_gathered() -> None:
    def body() -> None:
        model = fully_shard(a_model())
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(2, 6)).sum()).backward()
        with CommDebugMode() as comms:
            scaler.unscale_(optimizer)
        assert comms.get_comm_counts() == {"all_reduce": 1}

    run_threads(2, body)
