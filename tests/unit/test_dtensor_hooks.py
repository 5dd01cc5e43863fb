"""Hooks of tensors and modules on DTensors, and activation checkpointing through modules of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from disttrain.dtensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    implicit_replication,
)
from disttrain.errors import LayoutError
from disttrain.mesh import DeviceMesh
from disttrain.process_group import count_collectives
from disttrain.testing import run_threads
from tests.cases.shardings import mesh_of, normal

X = normal(5, 3)


def sharded(mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(X, mesh, [Shard(0)] * mesh.ndim, src_data_rank=None).requires_grad_()


def gradient_with_hook(mesh: DeviceMesh, hook: Callable[[DTensor], Any], *, on_leaf: bool) -> DTensor:
    leaf = sharded(mesh)
    doubled = leaf * 2
    (leaf if on_leaf else doubled).register_hook(hook)
    doubled.square().sum().backward()
    assert isinstance(leaf.grad, DTensor)
    return leaf.grad


@pytest.mark.parametrize("on_leaf", [True, False])
def test_hooks_see_and_replace_gradients(on_leaf: bool) -> None:
    def body() -> None:
        mesh = mesh_of((3,))
        seen: list[DTensor] = []
        for hook, factor in (
            (seen.append, 1),
            (lambda grad: grad * 3, 3),
            (lambda grad: grad.redistribute(placements=[Replicate()]), 1),
            (lambda grad: distribute_tensor(grad.full_tensor() * 2, mesh, [Shard(1)], src_data_rank=None), 2),
            (
                lambda grad: DTensor.from_local(grad.to_local() + grad.to_local(), mesh, grad.placements, shape=(5, 3)),
                2,
            ),
        ):
            torch.testing.assert_close(gradient_with_hook(mesh, hook, on_leaf=on_leaf).full_tensor(), 8 * factor * X)
        torch.testing.assert_close(seen[0].full_tensor(), 8 * X if on_leaf else 4 * X)

    run_threads(3, body)


@pytest.mark.parametrize("on_leaf", [True, False])
def test_a_plain_tensor_from_a_hook_is_refused_or_said_to_be_the_whole(on_leaf: bool) -> None:
    def body() -> None:
        mesh = mesh_of((2,))
        ones = torch.ones(5, 3, dtype=X.dtype)
        for hook in (lambda _: ones, lambda grad: grad.to_local(), lambda grad: grad.full_tensor()):
            with pytest.raises(LayoutError, match=r"hook returns a plain tensor.*from_local.*implicit_replication"):
                gradient_with_hook(mesh, hook, on_leaf=on_leaf)
        with pytest.raises(LayoutError, match=r"meets a plain tensor of shape \(5, 3\)"):
            gradient_with_hook(mesh, lambda grad: grad * ones, on_leaf=on_leaf)
        with implicit_replication():
            for hook in (lambda grad: grad.full_tensor() * ones, lambda grad: grad * ones):
                torch.testing.assert_close(gradient_with_hook(mesh, hook, on_leaf=on_leaf).full_tensor(), 8 * X)

    run_threads(2, body)


def test_hooks_after_accumulation_and_of_modules() -> None:
    def body() -> None:
        mesh = mesh_of((2,))
        order: list[Any] = []
        module = nn.Linear(3, 4).double()
        distribute_module(module, mesh)
        module.register_forward_pre_hook(lambda _, given: order.append(("before", given[0].placements)))
        module.register_forward_hook(lambda _, __, result: order.append(("after", result.placements)))
        module.register_full_backward_pre_hook(lambda _, grads: order.append(("gradient", type(grads[0]))))
        module.register_full_backward_hook(lambda _, grads, __: order.append(("passed on", type(grads[0]))))
        module.weight.register_post_accumulate_grad_hook(lambda p: order.append(("weight", type(p.grad))))
        x = sharded(mesh)
        result = module(x)
        twice = result * 2
        torch.autograd.graph.register_multi_grad_hook((result, twice), lambda grads: order.append(("both", len(grads))))
        twice.sum().backward()
        assert order[:2] == [("before", (Shard(0),)), ("after", (Shard(0),))]
        backward = [("gradient", DTensor), ("passed on", DTensor), ("weight", DTensor), ("both", 2)]
        assert sorted(order[2:], key=str) == sorted(backward, key=str)

    run_threads(2, body)


def layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed))
    return model


def gradients_of_layers() -> dict[str, torch.Tensor]:
    model = layers()
    model(X).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_small_gradients_are_reduced_together_when_a_backward_ends() -> None:
    expected = gradients_of_layers()

    def body() -> None:
        mesh = mesh_of((3,))
        model = distribute_module(layers(), mesh)
        for round_number in (1, 2):
            loss = model(sharded(mesh)).square().sum()
            with count_collectives() as counted:
                loss.backward()
            if round_number == 1:
                assert counted.total.operations == 1
            for name, parameter in model.named_parameters():
                assert isinstance(parameter.grad, DTensor)
                assert parameter.grad.placements == (Replicate(),)
                torch.testing.assert_close(parameter.grad.to_local(), round_number * expected[name])

    run_threads(3, body)


def test_hooks_of_one_rank_see_gradients_as_parameters_lie() -> None:
    """Whoever has them, ranks reduce alike; and a step may be made there."""
    expected = gradients_of_layers()

    def body() -> None:
        mesh = mesh_of((3,))
        model = distribute_module(layers(), mesh)
        seen: dict[str, torch.Tensor] = {}

        def look(name: str, parameter: Any) -> None:
            assert not torch.is_grad_enabled()
            seen[name] = parameter.grad.to_local().clone()

        def step(parameter: Any) -> None:
            parameter.sub_(parameter.grad)
            parameter.grad = None

        if mesh.get_local_rank() == 1:
            for name, parameter in model.named_parameters():
                parameter.register_post_accumulate_grad_hook(functools.partial(look, name))
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        before = {name: parameter.full_tensor().clone() for name, parameter in model.named_parameters()}
        model(sharded(mesh)).square().sum().backward()
        assert set(seen) == (set(expected) if mesh.get_local_rank() == 1 else set())
        for name, grad in seen.items():
            torch.testing.assert_close(grad, expected[name])
        for name, parameter in model.named_parameters():
            assert parameter.grad is None
            torch.testing.assert_close(parameter.full_tensor(), before[name] - expected[name])

    run_threads(3, body)


def test_a_backward_that_fails_leaves_nothing_that_waits() -> None:
    expected = gradients_of_layers()

    def body() -> None:
        mesh = mesh_of((3,))
        model = distribute_module(layers(), mesh)
        x = sharded(mesh)
        handle = x.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x).square().sum().backward()
        handle.remove()
        num_grads = {name: 1 + (parameter.grad is not None) for name, parameter in model.named_parameters()}
        assert 2 in num_grads.values()
        model(x).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            assert parameter.grad.placements == (Replicate(),)
            torch.testing.assert_close(parameter.grad.to_local(), num_grads[name] * expected[name])

    run_threads(3, body)


@pytest.mark.filterwarnings("ignore:Using backward")  # a cycle, which the test breaks
def test_gradients_with_gradients_do_not_wait() -> None:
    def body() -> None:
        mesh = mesh_of((2,))
        weight = nn.Parameter(distribute_tensor(normal(5, 3, seed=1), mesh, src_data_rank=None))
        (sharded(mesh).detach() * weight).square().sum().backward(create_graph=True)
        assert isinstance(weight.grad, DTensor)
        assert weight.grad.placements == (Replicate(),)
        torch.testing.assert_close(weight.grad.full_tensor(), 2 * X.square() * normal(5, 3, seed=1))
        weight.grad = None

    run_threads(2, body)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4).double(), nn.Linear(4, 3).double()
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(normal(*parameter.shape, seed=seed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh()) + x


def cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """The first layer by its results, the second by its arguments, as tensor parallelism does."""
    dims = {"up": {"weight": 0, "bias": 0}, "down": {"weight": 1}}
    for parameter_name, dim in dims.get(name, {}).items():
        parameter = module.get_parameter(parameter_name)
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(dim)]
        whole = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
        module.register_parameter(parameter_name, nn.Parameter(whole))


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2), (1, 3)])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_that_are_computed_again(reentrant: bool, mesh_shape: tuple[int, ...]) -> None:
    expected, plain = Block(), X.clone().requires_grad_()
    expected(expected(plain)).square().mean().backward()

    def body() -> None:
        mesh = mesh_of(mesh_shape)
        module = Block()
        distribute_module(module, mesh, cut)
        for placements in ([Shard(0)] * mesh.ndim, [Replicate()] * mesh.ndim):
            module.zero_grad()
            x = distribute_tensor(X, mesh, placements, src_data_rank=None).requires_grad_()
            # Threads share one random state, which nobody may set back for himself.
            options = {"use_reentrant": reentrant, "preserve_rng_state": False}
            once = checkpoint(module, x, **options)
            checkpoint(module, once, **options).square().mean().backward()
            assert isinstance(x.grad, DTensor)
            torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
            for found, wanted in zip(module.parameters(), expected.parameters(), strict=True):
                assert isinstance(found.grad, DTensor)
                torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)

    num_ranks = torch.Size(mesh_shape).numel()
    run_threads(num_ranks, body)


def test_saved_tensors_may_be_packed() -> None:
    def body() -> None:
        x = sharded(mesh_of((2,)))
        packed: list[Any] = []

        def pack(tensor: DTensor) -> tuple[torch.Tensor, Any]:
            packed.append(tensor.placements)
            return tensor.to_local().half(), tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda given: given[1]):
            result = x.square().sum()
        result.backward()
        assert packed == [(Shard(0),)]
        assert isinstance(x.grad, DTensor)
        torch.testing.assert_close(x.grad.full_tensor(), 2 * X)

    run_threads(2, body)
