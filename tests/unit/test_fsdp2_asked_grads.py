"""Gradients of sharded parameters that are asked for: torch.autograd.grad, and backward(inputs=...)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import DTensor
from disttrain.errors import ShardingError
from disttrain.fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from disttrain.testing import run_threads

torch.manual_seed(0)
PLAIN = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 7), nn.Tanh()), nn.Linear(7, 3)).double()
PLAIN[3].bias = nn.Parameter(torch.rand(3).double())
BATCH = torch.randn(12, 6, dtype=torch.float64)


def sharded(**options: object) -> nn.Sequential:
    model = copy.deepcopy(PLAIN)
    fully_shard(model[2], **options)  # type: ignore[arg-type]
    return fully_shard(model, **options)  # type: ignore[arg-type]


def own_batch() -> torch.Tensor:
    return BATCH.chunk(disttrain.get_world_size())[disttrain.get_rank()]


def whole(grad: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(grad, DTensor)
    return grad.full_tensor()


def loss_of(model: nn.Module, batch: torch.Tensor, *, is_penalized: bool = False) -> torch.Tensor:
    loss = model(batch).square().mean()
    for parameter in model.parameters() if is_penalized else ():
        penalty = parameter.square().sum()
        loss = loss + (penalty.full_tensor() if isinstance(penalty, DTensor) else penalty)
    return loss


@pytest.mark.parametrize("is_penalized", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_grads_are_those_of_one_process_in_parts(world_size: int, is_penalized: bool) -> None:
    loss = loss_of(PLAIN, BATCH, is_penalized=is_penalized)
    expected = torch.autograd.grad(loss, list(PLAIN.parameters()))

    def body() -> None:
        model = sharded()
        stepped: list[int] = []
        hooked: list[torch.Tensor] = []
        model[0].weight.register_post_accumulate_grad_hook(lambda _: stepped.append(1))
        model[0].weight.register_hook(hooked.append)
        grads = torch.autograd.grad(loss_of(model, own_batch(), is_penalized=is_penalized), list(model.parameters()))
        for grad, parameter, correct in zip(grads, model.parameters(), expected, strict=True):
            torch.testing.assert_close(whole(grad), correct)
            assert isinstance(grad, DTensor)
            assert grad.placements == parameter.placements  # type: ignore[attr-defined]
            assert parameter.grad is None
        assert not stepped
        assert hooked
        if not is_penalized:
            loss_of(model, own_batch()).backward()
            for parameter, correct in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(whole(parameter.grad), correct)
            assert stepped == [1]

    run_threads(world_size, body)


@pytest.mark.parametrize("mesh_shape", [(2, 1), (1, 2), (2, 2)])
def test_gradients_that_are_there_stay_and_those_of_inputs_come_too(mesh_shape: tuple[int, int]) -> None:
    batch = BATCH.clone().requires_grad_()
    expected = torch.autograd.grad(loss_of(PLAIN, batch), [batch, *PLAIN[2].parameters()])

    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("copies", "parts"))
        model = sharded(mesh=mesh)
        assert isinstance(model, FSDPModule)
        loss_of(model, own_batch()).backward()
        before = [whole(parameter.grad) for parameter in model.parameters()]
        # What has been collected and not reduced stays so.
        model.set_requires_gradient_sync(False)
        loss_of(model, own_batch()).backward()
        own = own_batch().clone().requires_grad_()
        of_own, *grads = torch.autograd.grad(loss_of(model, own), [own, *model[2].parameters()])
        world_size = disttrain.get_world_size()
        torch.testing.assert_close(of_own, expected[0].chunk(world_size)[disttrain.get_rank()] * world_size)
        for grad, correct in zip(grads, expected[1:], strict=True):
            torch.testing.assert_close(whole(grad), correct)
        for parameter, grad in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(whole(parameter.grad), grad)
        model.set_requires_gradient_sync(True)
        loss_of(model, own_batch()).backward()
        for parameter, grad in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(whole(parameter.grad), 3 * grad)

    run_threads(mesh_shape[0] * mesh_shape[1], body)


def test_a_backward_for_some_accumulates_into_these_alone() -> None:
    expected = torch.autograd.grad(loss_of(PLAIN, BATCH), list(PLAIN[2].parameters()))

    def body() -> None:
        model = sharded()
        for _ in range(2):
            loss_of(model, own_batch()).backward(inputs=list(model[2].parameters()))
        for parameter, correct in zip(model[2].parameters(), expected, strict=True):
            torch.testing.assert_close(whole(parameter.grad), 2 * correct)
        assert model[0].weight.grad is None
        assert model[3].weight.grad is None

    run_threads(2, body)


def test_grads_in_fewer_bits_come_in_the_parameters_dtype() -> None:
    def body() -> None:
        model = sharded(mp_policy=MixedPrecisionPolicy(torch.float32, torch.float64))
        assert isinstance(model, FSDPModule)
        model.set_reduce_scatter_unused_params(True)
        grads = torch.autograd.grad(loss_of(model, own_batch().float()), list(model.parameters()))
        for grad, correct in zip(
            grads, torch.autograd.grad(loss_of(PLAIN, BATCH), list(PLAIN.parameters())), strict=True
        ):
            torch.testing.assert_close(whole(grad), correct, rtol=1e-5, atol=1e-6)

    run_threads(2, body)


def test_parameters_of_several_models_are_reduced_in_the_order_in_which_they_are_given() -> None:
    models = nn.ModuleList([nn.Linear(6, 6, bias=bool(place % 2)) for place in range(5)]).double()

    def through(models: nn.ModuleList) -> torch.Tensor:
        value = own_batch() if disttrain.is_initialized() else BATCH
        for model in models:
            value = model(value)
        return value.square().mean()

    expected = torch.autograd.grad(through(models), [*reversed([*models.parameters()])])

    def body() -> None:
        twins = nn.ModuleList(map(fully_shard, copy.deepcopy(models)))
        grads = torch.autograd.grad(through(twins), [*reversed([*twins.parameters()])])
        for grad, correct in zip(grads, expected, strict=True):
            torch.testing.assert_close(whole(grad), correct)

    run_threads(3, body)


def test_compiled_functions_ask_for_gradients_as_before() -> None:
    def cubed(x: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad((x**3).sum(), x)
        return grad * 2

    def body() -> None:
        sharded()(own_batch())
        x = torch.randn(3, requires_grad=True)
        torch.testing.assert_close(torch.compile(cubed, backend="eager")(x), 6 * x**2)

    run_threads(1, body)


def test_unused_ones_are_none_where_that_is_allowed() -> None:
    def body() -> list[str]:
        model = sharded()
        other = torch.ones(2, requires_grad=True)
        asked = [model[2][0].weight, other, model[3].bias]
        model(own_batch())
        none, zeros = (
            torch.autograd.grad(model[2](own_batch()[:, :5]).sum(), asked, **how)
            for how in ({"allow_unused": True}, {"materialize_grads": True})
        )
        assert none[1] is none[2] is None
        assert none[0] is not None
        assert torch.equal(zeros[1], torch.zeros(2))
        assert torch.equal(whole(zeros[2]), torch.zeros(3))
        problems = []
        for options in ({}, {"create_graph": True}, {"is_grads_batched": True, "grad_outputs": torch.ones(2)}):
            with pytest.raises(ShardingError) as raised:
                torch.autograd.grad(model(own_batch()).sum(), asked[:2], **options)  # type: ignore[arg-type]
            problems.append(raised.value.problem)
        torch.testing.assert_close(
            whole(torch.autograd.grad(loss_of(model, own_batch()), model[0].weight)[0]),
            torch.autograd.grad(loss_of(PLAIN, BATCH), PLAIN[0].weight)[0],
        )
        return problems

    for problems in run_threads(2, body):
        assert problems == [
            "input 1 has not been used for the outputs.",
            "create_graph=True would need the graph of gradients of sharded parameters, such as 0.weight.",
            "is_grads_batched=True would need the graph of gradients of sharded parameters, such as 0.weight.",
        ]
