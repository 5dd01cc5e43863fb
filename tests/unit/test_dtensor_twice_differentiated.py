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
from tests.cases.shardings import collectives_of, laid_out, mesh_of, normal

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

# With corners, or of formulas that torch gives plain zeros for a gradient.
CORNERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "magnitude": lambda x: (x.abs() * x).sum(),
    "magnitude alone": lambda x: x.abs().sum() + x.pow(3).sum(),
    "signs": lambda x: (x.sgn() * x.square()).sum(),
    "l1 norm": lambda x: (x * torch.linalg.vector_norm(x, 1)).sum(),
    "xlogy": lambda x: torch.special.xlogy(x, x.abs() + 0.5).sum(),
    "hypotenuse": lambda x: torch.hypot(x, x.abs()).sum(),
    "copied sign": lambda x: (torch.copysign(x, x) * x).sum(),
    "softsign": lambda x: functional.softsign(x).sum(),
    "average pool": lambda x: functional.avg_pool1d(x[None], 2).pow(3).sum(),
    "pool of the largest": lambda x: functional.max_pool1d(x[None], 2).pow(3).sum(),
    "adaptive pool": lambda x: functional.adaptive_avg_pool1d(x[None], 2).pow(3).sum(),
    "reflected": lambda x: functional.pad(x[None], (1, 2), mode="reflect").pow(3).sum(),
    "trace": lambda x: x[:3].trace() * x.pow(2).sum(),
    "determinants": lambda x: torch.linalg.det(x[:, :, None] * x[:, None, :] + torch.diag_embed(x)).sum(),
    "normalized": lambda x: functional.normalize(x).pow(3).sum(),
    "singular values": lambda x: torch.linalg.svdvals(x).pow(3).sum(),
}


def twice(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """The gradient, and the gradient of its square's sum."""
    (first,) = torch.autograd.grad(function(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return [first.detach(), second]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2), (2, 1)])
@pytest.mark.parametrize("functions", [FUNCTIONS, CORNERS], ids=["smooth", "corners"])
def test_operators(functions: dict[str, Callable[[torch.Tensor], torch.Tensor]], mesh_shape: tuple[int, ...]) -> None:
    expected = {name: twice(function, X.clone().requires_grad_()) for name, function in functions.items()}

    def body() -> None:
        mesh = mesh_of(mesh_shape)
        for name, function in functions.items():
            for placement in (Shard(0), Shard(1), Replicate(), Partial()):
                x = laid_out(X, mesh, [placement] * mesh.ndim).requires_grad_()
                for found, wanted in zip(twice(function, x), expected[name], strict=True):
                    assert isinstance(found, DTensor)
                    note = f"{name}, {placement}"
                    torch.testing.assert_close(
                        found.full_tensor(), wanted, msg=lambda text, note=note: f"{note}: {text}"
                    )

    run_threads(torch.Size(mesh_shape).numel(), body)


@pytest.mark.parametrize("shape", [(4, 4), (5, 7), (3, 1)])
def test_a_trace_leaves_a_gradient_that_lies_on_the_mesh(shape: tuple[int, ...]) -> None:
    plain = normal(*shape).requires_grad_()
    plain.diagonal().sum().backward()  # the trace's own is wrong in torch 2.11, where rows are left over

    def body() -> None:
        for placement in (Shard(0), Shard(1), Replicate()):
            x = distribute_tensor(normal(*shape), mesh_of((2,)), [placement], src_data_rank=None).requires_grad_()
            x.trace().backward()
            assert isinstance(x.grad, DTensor)
            torch.testing.assert_close(x.grad.full_tensor(), plain.grad)

    run_threads(2, body)


@pytest.mark.parametrize(
    "function",
    [
        functional.avg_pool1d,
        functional.max_pool1d,
        lambda x, size: functional.pad(x, (size, 0), mode="replicate"),
        lambda x, _: functional.prelu(x, torch.full_like(x.detach()[0, 0, :1], 0.25)),
        lambda x, _: functional.prelu(x, torch.full_like(x.detach()[0, 0, :1], 0.25).requires_grad_()),
    ],
)
def test_a_second_gradient_that_is_zero_lies_on_the_mesh(function: Callable[..., torch.Tensor]) -> None:
    def body() -> None:
        x = distribute_tensor(X, mesh_of((2,)), [Shard(0)], src_data_rank=None).requires_grad_()
        (first,) = torch.autograd.grad(function(x[None], 2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert isinstance(second, DTensor)
        assert torch.equal(second.full_tensor(), torch.zeros_like(X))

    run_threads(2, body)


@pytest.mark.parametrize("num_weights", [1, 3])
@pytest.mark.parametrize("outputs", [[0], [1], [0, 1]])
def test_prelu_is_differentiated_twice_as_torch_does_also_at_zero(num_weights: int, outputs: list[int]) -> None:
    values = torch.tensor([[-1.0, 0.0, 2.0], [0.0, -3.0, 0.5], [1.5, -2.0, 0.0]])

    def seconds(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        x, weight = x.requires_grad_(), weight.requires_grad_()
        grad = torch.full_like(x.detach(), 0.75).requires_grad_()
        firsts = torch.autograd.grad(functional.prelu(x, weight), (x, weight), grad, create_graph=True)
        total = sum((firsts[place] * (place + 2)).sum() for place in outputs)
        return list(torch.autograd.grad(total, (x, weight, grad)))

    def body() -> None:
        mesh = mesh_of((2,))
        weight = torch.arange(1.0, 1 + num_weights) / 4
        expected = seconds(values.clone(), weight.clone())
        found = seconds(
            distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None),
            distribute_tensor(weight, mesh, [Replicate()], src_data_rank=None),
        )
        for one, other in zip(found, expected, strict=True):
            assert isinstance(one, DTensor)
            torch.testing.assert_close(one.full_tensor(), other)

    run_threads(2, body)


@pytest.mark.parametrize("asks", [False, True])
def test_a_weight_s_second_gradient_that_is_zero_lies_on_the_mesh(asks: bool) -> None:
    def body() -> None:
        x = distribute_tensor(X, mesh_of((2,)), [Shard(0)], src_data_rank=None).requires_grad_(asks)
        weight = torch.full_like(x.detach()[0, :1], 0.25).requires_grad_()
        (first,) = torch.autograd.grad(functional.prelu(x, weight).sum(), weight, create_graph=True)
        assert torch.equal(first.full_tensor(), X.clamp(max=0).sum().view(1))
        (second,) = torch.autograd.grad(first.sum(), weight)
        assert isinstance(second, DTensor)
        assert torch.equal(second.full_tensor(), torch.zeros(1))

    run_threads(2, body)


@pytest.mark.parametrize(
    "function",
    [torch.abs, torch.square, lambda x: functional.avg_pool1d(x[None], 2), lambda x: functional.max_pool1d(x[None], 2)],
)
def test_a_plain_gradient_of_the_result_is_taken_for_every_rank_s(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    plain = X.clone().requires_grad_()
    result = function(plain)
    grad = normal(*result.shape)
    result.backward(grad)

    def body() -> None:
        x = distribute_tensor(X, mesh_of((2,)), [Shard(0)], src_data_rank=None).requires_grad_()
        function(x).backward(grad)
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)  # type: ignore[union-attr]

    run_threads(2, body)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat([x, x[0][:0].sin()]),
        lambda x: torch.cat([x[0][:0], x.detach()[1], x.detach()[1]]),
        lambda x: x.repeat(0, 1),
        lambda x: x[1:].tile(2, 0),
    ],
)
def test_zeros_that_torch_makes_lie_on_the_mesh(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    plain = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(function(plain).sum(), plain)

    def body() -> None:
        for placement in (Shard(0), Replicate()):
            leaf = distribute_tensor(X, mesh_of((2,)), [placement], src_data_rank=None).requires_grad_()
            for _ in range(2):
                (grad,) = torch.autograd.grad(function(leaf).sum(), leaf)
                assert isinstance(grad, DTensor)
                assert torch.equal(grad.full_tensor(), expected)
            nothing = leaf.detach()[0, :0].requires_grad_()
            for _ in range(2):
                torch.cat([leaf, nothing]).sum().backward()
            assert isinstance(nothing.grad, DTensor)
            assert len(nothing._backward_hooks) == 1

    run_threads(2, body)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.repeat(0, 1),
        lambda x: x.repeat((2, 0)),
        lambda x: x.repeat(repeats=(0, 1)),
        lambda x: x.tile(0),
        lambda x: x.tile((1, 1, 0)),
        lambda x: torch.tile(x, (0, 1)),
    ],
)
def test_zeros_of_what_is_computed_on_the_way_lie_on_the_mesh(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Asked for together with what lies before it, where a hook comes too late."""

    def grads(leaf: torch.Tensor) -> tuple[torch.Tensor, ...]:
        middle = leaf * 2
        return torch.autograd.grad(function(middle).sum(), (leaf, middle))

    expected = grads(X.clone().requires_grad_())

    def body() -> None:
        for placement in (Shard(0), Replicate()):
            leaf = distribute_tensor(X, mesh_of((2,)), [placement], src_data_rank=None).requires_grad_()
            for grad, plain in zip(grads(leaf), expected, strict=True):
                assert isinstance(grad, DTensor)
                assert torch.equal(grad.full_tensor(), plain)

    run_threads(2, body)


def test_signs_of_what_needs_no_gradient() -> None:
    """Where torch has autograd watch, where it doesn't, and where it can't."""

    def body() -> None:
        x = distribute_tensor(X, mesh_of((2,)), [Shard(0)], src_data_rank=None)
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                for function in (torch.sgn, lambda x: torch.copysign(x, -x), lambda x: x.trace()):
                    torch.testing.assert_close(function(x).full_tensor(), function(X))

    run_threads(2, body)


def test_parts_without_values_move_nowhere() -> None:
    """As where autograd asks, on the meta device, what shape a sum has."""

    def body() -> None:
        mesh = mesh_of((2,))
        for begin, end in (
            (Partial(), Replicate()),
            (Partial(), Shard(0)),
            (Shard(0), Shard(1)),
            (Shard(1), Replicate()),
        ):
            x = laid_out(X, mesh, [begin]).to("meta")
            assert collectives_of(lambda x=x, end=end: x.redistribute(placements=[end])) == []
            found = x.redistribute(placements=[end])
            assert found.device.type == "meta"
            assert tuple(found.to_local().shape) == found._spec.local_shape
            assert tuple((found + torch.empty(5, 3, device="meta")).shape) == (5, 3)

    run_threads(2, body)


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
