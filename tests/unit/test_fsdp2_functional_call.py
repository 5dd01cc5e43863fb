"""torch.func.functional_call on sharded models: given values are used in the call, and in no other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.dtensor import Shard, distribute_tensor
from disttrain.errors import DisttrainError, ShardingError
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.testing import run_threads
from tests.unit.test_fsdp2_shown import PLAIN, X, assert_shards, assert_trains, own, sharded


def doubled(model: nn.Module, kind: str) -> dict[str, torch.Tensor]:
    """Values of twice the parameters, as users make them."""
    values = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    if kind == "parameters":
        return {name: nn.Parameter(value) for name, value in values.items()}
    if kind == "whole":
        return {name: value.full_tensor() for name, value in values.items()}
    if kind == "some":
        return {name: value for name, value in values.items() if name in ("head.weight", "blocks.0.0.bias")}
    return values


def doubled_plain(names: dict[str, torch.Tensor]) -> nn.Module:
    plain = copy.deepcopy(PLAIN)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.mul_(2 if name in names else 1)
    return plain


@pytest.mark.parametrize("kind", ["shards", "parameters", "whole", "some"])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_values_are_used_in_the_call_and_in_no_other(kind: str, reshard: bool | None) -> None:
    def body() -> None:
        for before in (False, True):
            model = sharded(reshard_after_forward=reshard)
            if before:
                model(own(X)).square().mean().backward()
                model(own(X))
            kept = dict(model.named_parameters())
            given = doubled(model, kind)
            values = dict(given)
            torch.testing.assert_close(functional_call(model, given, (X,)), doubled_plain(given)(X))
            assert all(given[name] is value for name, value in values.items())
            assert all(parameter is kept[name] for name, parameter in model.named_parameters())
            assert_shards(model)
            torch.testing.assert_close(model(X), PLAIN(X))
            with torch.no_grad():
                torch.testing.assert_close(functional_call(model, given, (X,)), doubled_plain(given)(X))
            assert_trains(model, torch.optim.SGD(model.parameters(), 0.1))

    run_threads(2, body)


@pytest.mark.parametrize("kind", ["shards", "parameters", "whole", "some"])
def test_a_state_dict_within_the_call_leaves_the_values_in_use(kind: str) -> None:
    def body() -> None:
        model = sharded()
        given = doubled(model, kind)
        found: list[dict[str, torch.Tensor]] = []
        model.within = lambda one: found.append(one.state_dict())
        torch.testing.assert_close(functional_call(model, given, (X,)), doubled_plain(given)(X))
        assert all(torch.equal(found[0][name], value.detach()) for name, value in given.items())
        model.within = None
        assert_shards(model)
        torch.testing.assert_close(model(X), PLAIN(X))

    run_threads(2, body)


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_gradients_reach_what_the_values_were_made_of(world_size: int) -> None:
    """A step within a step, as of meta-learning, on rows of each rank: the outer gradient is that of one process."""

    def body() -> None:
        shape, axes = ((2, 2), ("copies", "shards")) if world_size == 4 else ((world_size,), ("shards",))
        mesh = disttrain.init_device_mesh("cpu", shape, mesh_dim_names=axes)
        model = sharded(mesh=mesh)
        plain = copy.deepcopy(PLAIN)
        rows = X.repeat(3, 1)
        for one, part in ((model, own(rows)), (plain, rows)):
            scale = {name: torch.ones_like(p).requires_grad_() for name, p in one.named_parameters()}
            given = {name: p.detach() * scale[name] for name, p in one.named_parameters()}
            loss = functional_call(one, given, (part,)).square().mean()
            one.found = torch.autograd.grad(loss, list(scale.values()))
        for ours, theirs in zip(model.found, plain.found, strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs)
        assert all(parameter.grad is None for parameter in model.parameters())

    run_threads(world_size, body)


def test_parameters_that_are_not_given_are_trained_as_ever() -> None:
    def body() -> None:
        model, plain = sharded(), copy.deepcopy(PLAIN)
        for one, rows in ((model, own(X)), (plain, X)):
            given = {"head.weight": one.head.weight.detach() * 2, "blocks.1.0.bias": one.blocks[1][0].bias.detach() * 2}
            (functional_call(one, given, (rows,)).square().mean() + one(rows).square().mean()).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda text, name=name: f"{name}: {text}")

    run_threads(2, body)


def test_values_are_computed_with_in_the_dtype_of_the_policy_and_divided_as_asked() -> None:
    def body() -> None:
        model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
        for module in (model, *model.blocks):
            module.set_gradient_divide_factor(1.0)
        given = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
        plain = copy.deepcopy(PLAIN)
        functional_call(model, given, (own(X),)).double().square().mean().backward()
        (plain(X).square().mean() * 2).backward()
        for value, q in zip(given.values(), plain.parameters(), strict=True):
            torch.testing.assert_close(value.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-5)
            assert value.grad.dtype == torch.float64

    run_threads(2, body)


def test_a_tied_parameter_is_given_once() -> None:
    tied = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False)).double()
    tied[2].weight = tied[0].weight
    expected = copy.deepcopy(tied)
    with torch.no_grad():
        expected[0].weight.mul_(2)

    def body() -> None:
        model = fully_shard(copy.deepcopy(tied))
        given = {"0.weight": model[0].weight.detach() * 2}
        torch.testing.assert_close(functional_call(model, given, (X,)), expected(X))
        assert model[0].weight is model[2].weight
        torch.testing.assert_close(model(X), tied(X))

    run_threads(2, body)


class Recomputed(nn.Module):
    """A layer that is in two places, of which a backward computes each again."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6).double()
        self.second = self.first
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant).tanh()
        return x


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("each", [True, False])
def test_what_torch_leaves_in_a_layer_of_two_places_is_computed_with_again(use_reentrant: bool, each: bool) -> None:
    """Of such a layer, functional_call puts the given value back, not what was there."""
    plain = Recomputed(use_reentrant)

    def body() -> None:
        model, expected = copy.deepcopy(plain), copy.deepcopy(plain)
        if each:
            fully_shard(model.first)
        fully_shard(model)
        found = []
        for one, rows in ((model, own(X)), (expected, X)):
            given = {name: (p.detach() * 0.8).requires_grad_() for name, p in one.named_parameters()}
            x = rows.clone().requires_grad_()
            functional_call(one, given, (x,))
            assert one.first.weight is given["first.weight"]
            one(x).square().mean().backward()
            found.append((x.grad, [value.grad for value in given.values()]))
            assert one.first.weight is given["first.weight"]
        (x_grad, grads), (expected_x_grad, expected_grads) = found
        torch.testing.assert_close(x_grad, own(expected_x_grad) * disttrain.get_world_size())
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(grad.full_tensor(), expected_grad)

    run_threads(2, body)


def test_what_cannot_be_computed_with_is_refused_on_all_ranks() -> None:
    def body() -> None:
        model = sharded()
        mesh = model.head.weight.device_mesh
        wrong = {
            "shape": torch.zeros(5, 5),
            "on": distribute_tensor(torch.zeros(4, 6).double(), mesh, [Shard(0)]),
            "functional_call": model.head.weight.to_local()[:1],
        }
        for word, value in wrong.items():
            with pytest.raises(DisttrainError, match=f"functional_call.*head.weight.*{word}|{word}.*head.weight"):
                functional_call(model, {"head.weight": value}, (own(X),))
            assert_shards(model)
            torch.testing.assert_close(model(X), PLAIN(X))

    run_threads(2, body)


def test_transforms_of_functions_are_refused() -> None:
    def body() -> None:
        model = sharded()
        given = {name: p.detach() for name, p in model.named_parameters()}
        with pytest.raises(ShardingError, match=r"within a transform of torch\.func"):
            torch.func.grad(lambda values: functional_call(model, values, (X,)).square().mean())(given)
        with pytest.raises(ShardingError, match=r"within a transform of torch\.func"):
            torch.vmap(model)(X)
        assert_shards(model)
        torch.testing.assert_close(model(X), PLAIN(X))

    run_threads(2, body)
