"""Gradients of gradients: through operators on DTensors, and through the ways in, out and across layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from disttrain.mesh import DeviceMesh
from disttrain.testing import run_threads
from tests.sharding_cases import laid_out, mesh_of, normal

X = normal(5, 3)

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "power": lambda x: (x**3).sum(),
    "product": lambda x: (x @ x.mT).square().sum(),
    "layer norm": lambda x: functional.layer_norm(x, (3,)).pow(3).sum(),
    "batch norm": lambda x: functional.batch_norm(x, None, None, training=True).pow(3).sum(),
    "softmax": lambda x: x.softmax(0).square().sum(),
    "cross entropy": lambda x: functional.cross_entropy(x, x.detach().softmax(1)),
    "extremum": lambda x: x.amax(0).pow(3).sum(),
    "convolution": lambda x: functional.conv1d(x[None], x[:2].view(2, 1, 3).expand(2, 5, 3)).square().sum(),
    "slice": lambda x: x[1:4].pow(3).sum(),
    "row": lambda x: x[1].pow(3).sum(),
    "gelu": lambda x: functional.gelu(x).square().sum(),
    "deviation": lambda x: x.std(0).pow(3).sum(),
    "concatenation": lambda x: torch.cat([x, x * x]).pow(3).sum(),
    "norm": lambda x: x.norm(),
    "running sum": lambda x: x.cumsum(0).pow(3).sum(),
    "regrouping": lambda x: x.view(15).pow(3).view(3, 5).sum(0).square().sum(),
}


def twice(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """The gradient, and the gradient of its square's sum."""
    (first,) = torch.autograd.grad(function(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return [first.detach(), second]


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2), (1, 3)])
def test_operators(mesh_shape: tuple[int, ...]) -> None:
    expected = {name: twice(function, X.clone().requires_grad_()) for name, function in FUNCTIONS.items()}

    def body() -> None:
        mesh = mesh_of(mesh_shape)
        for name, function in FUNCTIONS.items():
            for placement in (Shard(0), Shard(1), Replicate(), Partial()):
                x = laid_out(X, mesh, [placement] * mesh.ndim).requires_grad_()
                for found, wanted in zip(twice(function, x), expected[name], strict=True):
                    assert isinstance(found, DTensor)
                    note = f"{name}, {placement}"
                    torch.testing.assert_close(
                        found.full_tensor(), wanted, msg=lambda text, note=note: f"{note}: {text}"
                    )

    run_threads(torch.Size(mesh_shape).numel(), body)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_from_parts_to_the_whole_and_back(placement: Placement) -> None:
    def body() -> None:
        mesh = mesh_of((3,))
        local = distribute_tensor(X, mesh, [placement], src_data_rank=None).to_local().clone().requires_grad_()

        def cubes() -> torch.Tensor:
            tensor = DTensor.from_local(local, mesh, [placement], shape=X.shape)
            return (tensor**3).redistribute(placements=[Replicate()]).to_local().sum()

        (first,) = torch.autograd.grad(cubes(), local, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), local, create_graph=True)
        (third,) = torch.autograd.grad(second.sum(), local)
        torch.testing.assert_close(first, 3 * local**2)
        torch.testing.assert_close(second, 6 * local)
        torch.testing.assert_close(third, torch.full_like(local, 6))

    run_threads(3, body)


def test_through_parts_that_each_rank_uses_in_its_own_way() -> None:
    def used(x: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        part = x.to_local(grad_placements=[Partial()])
        own = part**3 * (mesh.get_local_rank() + 1)
        return DTensor.from_local(own, mesh, [Partial()]).sum()

    def body() -> list[Any]:
        mesh = mesh_of((2,))
        x = distribute_tensor(X, mesh, src_data_rank=None).requires_grad_()
        for found, wanted in zip(
            twice(lambda x: used(x, mesh), x),
            twice(lambda x: (3 * x**3).sum(), X.clone().requires_grad_()),
            strict=True,
        ):
            torch.testing.assert_close(found.full_tensor(), wanted)

    run_threads(2, body)
