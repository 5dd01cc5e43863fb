"""Layers of experts in training over ranks: shared experts, checkpoints, drops and messages."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import DTensor
from disttrain.experts import (
    Experts,
    MixtureOfExperts,
    combine,
    dispatch,
    faults,
    shard_experts,
)
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.expert_layers import HIDDEN, INTER, JUDGES, block, judge, our_block, ours, tokens
from tests.cases.expert_mixtures import Model, ep_mesh, mixture


def batch(step: int, size: int) -> list[torch.Tensor]:
    """Each rank's rows and targets; one rank has none."""
    generator = torch.Generator().manual_seed(step)
    counts = [4, 7, 0, 2][:size]
    return [torch.randn(2, count, HIDDEN, generator=generator, dtype=torch.float64) for count in counts]


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.full_tensor() if hasattr(parameter, "full_tensor") else parameter.grad
        for name, parameter in model.named_parameters()
    }


def sum_dense(model: nn.Module) -> None:
    """What a data-parallel wrapper does for parameters that all ranks have; experts' gradients are sums already."""
    for parameter in model.parameters():
        if not hasattr(parameter, "full_tensor"):
            disttrain.all_reduce(parameter.grad)


@pytest.mark.parametrize("checkpointed", [None, False, True], ids=["plain", "not reentrant", "reentrant"])
@pytest.mark.parametrize("exchange", ["all_to_all", "padded"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_model_has_the_gradients_of_one_process(size: int, exchange: str, checkpointed: bool | None) -> None:
    alone = Model()

    def body() -> None:
        model, reference = copy.deepcopy(alone), copy.deepcopy(alone)
        model.checkpointed = checkpointed
        shard_experts(model, ep_mesh(), exchange=exchange)
        parts = batch(0, size)
        # A first input of a reentrant checkpoint must want a gradient.
        own, whole = parts[disttrain.get_rank()].requires_grad_(), torch.cat(parts, 1)
        out = model(own)
        expected = reference(whole)
        begin = sum(part.shape[1] for part in parts[: disttrain.get_rank()])
        torch.testing.assert_close(out, expected[:, begin : begin + own.shape[1]])
        out.square().sum().backward()
        expected.square().sum().backward()
        sum_dense(model)
        torch.testing.assert_close(grads_of(model), grads_of(reference))

    run_threads(size, body)


@pytest.mark.parametrize("name", list(JUDGES))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_blocks_of_transformers_have_the_gradients_of_one_process(size: int, name: str) -> None:
    alone = block(name, 5, 2)

    def body() -> None:
        reference, parts = copy.deepcopy(alone), batch(0, size)
        layer = shard_experts(our_block(alone), ep_mesh())
        whole, own = torch.cat(parts, 1).requires_grad_(), parts[disttrain.get_rank()].requires_grad_()
        out, expected = layer(own), reference(whole)
        expected = expected[0] if isinstance(expected, tuple) else expected
        begin = sum(part.shape[1] for part in parts[: disttrain.get_rank()])
        torch.testing.assert_close(out, expected[:, begin : begin + own.shape[1]])
        out.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(own.grad, whole.grad[:, begin : begin + own.shape[1]])
        sum_dense(layer)
        wanted = {key.replace("gate.", "router."): grad for key, grad in grads_of(reference).items()}
        # DeepSeek-V3's router computes in fp32, so that ranks' terms of its gradient are rounded.
        close = {"rtol": 1e-4, "atol": 1e-3} if name == "deepseek_v3" else {}
        for key, grad in grads_of(layer).items():
            torch.testing.assert_close(grad, wanted.pop(key), **(close if key.startswith("router") else {}))
        assert not wanted

    run_threads(size, body)


def test_the_end_of_a_recomputation_is_no_error_to_tell_of(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Exception] = []
    monkeypatch.setattr(faults, "tell_of", lambda error, group: told.append(error))

    def body() -> None:
        model = shard_experts(Model(checkpointed=False), ep_mesh())
        model(torch.randn(3, HIDDEN, dtype=torch.float64)).sum().backward()

    run_threads(2, body)
    assert not told


def test_a_rank_without_experts_under_autocast() -> None:
    alone = Experts(4, HIDDEN, INTER)

    def body() -> None:
        layer, reference = shard_experts(copy.deepcopy(alone), ep_mesh()), copy.deepcopy(alone)
        x, indices, weights = tokens(disttrain.get_rank(), 5, 2, 4)
        outs, grads = [], []
        for module in (layer, reference):
            given = x.float().requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outs.append(module(given, indices, weights.float()))
            outs[-1].float().sum().backward()
            grads.append(given.grad)
        torch.testing.assert_close(outs[0], outs[1], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(grads[0], grads[1], rtol=2e-2, atol=2e-2)

    run_threads(3, body)


def test_a_module_keeps_its_name_and_what_its_forward_takes() -> None:
    def body() -> None:
        model = mixture()
        shard_experts(model, ep_mesh())
        assert type(model).__name__ == "MixtureOfExperts"
        assert isinstance(model, MixtureOfExperts)
        assert list(inspect.signature(model.forward).parameters) == ["x", "mask"]

    run_threads(2, body)


@on_ranks(2)
def test_a_loss_curve_is_that_of_one_process() -> None:
    model, reference = Model(), Model()
    shard_experts(model, ep_mesh())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, foreach=False) for each in (model, reference)]
    for step in range(50):
        parts = batch(step, 2)
        whole = torch.cat(parts, 1)
        own = parts[disttrain.get_rank()]
        loss = (model(own) - own.roll(1, -1)).square().sum() / whole.numel()
        expected = (reference(whole) - whole.roll(1, -1)).square().mean()
        loss.backward()
        expected.backward()
        sum_dense(model)
        total = loss.detach().clone()
        disttrain.all_reduce(total)
        assert abs(total.item() - expected.item()) < 1e-5
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_messages_of_a_layer() -> None:
    layer = shard_experts(ours(judge("mixtral", 4)), ep_mesh())
    x, indices, weights = tokens(disttrain.get_rank(), 5, 2, 4)
    x.requires_grad_()
    with disttrain.count_collectives() as counted:
        out = layer(x, indices, weights)
    assert counted.total.operations == 3, "sizes, rows there, rows back"
    with disttrain.count_collectives() as counted:
        out.sum().backward()
    assert counted.total.operations == 2
    assert {operation for _, operation in counted.counts} == {"all_to_all_single"}


def capped(indices: torch.Tensor, num_experts: int, room: int) -> torch.Tensor:
    """One assignment after the other: those that find no room name no expert."""
    used = [0] * num_experts
    kept = indices.clone()
    for token in range(len(indices)):
        for choice in range(indices.shape[1]):
            expert = int(indices[token, choice])
            used[expert] += 1
            if used[expert] > room:
                kept[token, choice] = num_experts
    return kept


@pytest.mark.parametrize("exchange", ["all_to_all", "padded"])
@pytest.mark.parametrize("capacity", [0.01, 0.7, 1.5, 9.0])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_expert_keeps_the_earliest(size: int, capacity: float, exchange: str) -> None:
    num_experts, k, count = 5, 2, 10
    alone = judge("mixtral", num_experts)

    def body() -> None:
        layer = shard_experts(ours(alone), ep_mesh(), capacity=capacity, exchange=exchange)
        x, indices, weights = tokens(disttrain.get_rank(), count, k, num_experts)
        room = max(1, -int(-capacity * count * k // num_experts))
        kept = capped(indices, num_experts, room)
        x.requires_grad_()
        out = layer(x, indices, weights)
        other = x.detach().clone().requires_grad_()
        expected = copy.deepcopy(alone)(other, kept, weights)
        torch.testing.assert_close(out, expected)
        assert layer.num_dropped.item() == (kept == num_experts).sum().item()
        out.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad, other.grad)

    run_threads(size, body)


def test_a_router_that_counts_is_told_what_was_dropped() -> None:
    class Counters:
        num_dropped = 0

        def add_dropped(self, num_dropped: torch.Tensor) -> None:
            self.num_dropped += int(num_dropped)

    def body() -> None:
        model = mixture()
        model.router.counters = Counters()
        shard_experts(model, ep_mesh(), capacity=0.01)
        # One row of each expert has room.
        model(torch.randn(30, HIDDEN, dtype=torch.float64))
        counted = model.router.counters.num_dropped
        assert 60 > counted >= 55
        model.eval()
        model(torch.randn(30, HIDDEN, dtype=torch.float64))
        assert model.router.counters.num_dropped == counted

    run_threads(2, body)


def test_dispatch_and_combine_are_inverse() -> None:
    def body() -> None:
        x, indices, weights = tokens(disttrain.get_rank(), 4, 2, 3)
        x.requires_grad_()
        sent = dispatch(x, indices, 3, ep_mesh())
        out = combine(sent.rows**3, sent, weights)
        torch.testing.assert_close(out, x**3 * weights.sum(1, keepdim=True))
        (grad,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(grad, 3 * x**2 * weights.sum(1, keepdim=True))

    run_threads(2, body)


@pytest.mark.parametrize("exchange", ["all_to_all", "padded"])
@pytest.mark.parametrize("capacity", [None, 1.0])
def test_the_way_in_one_node_is_that_in_many(exchange: str, capacity: float | None) -> None:
    """With a rank without experts, one without tokens, and choices of no expert."""

    def body() -> None:
        torch.manual_seed(0)
        layer = Experts(2, HIDDEN, 6, bias=True).double()
        shard_experts(layer, ep_mesh(), exchange=exchange, capacity=capacity)
        rank = disttrain.get_rank()
        generator = torch.Generator().manual_seed(rank)
        results: list[list[torch.Tensor]] = []
        for count in (8, (5, 0, 3)[rank]):
            x = torch.randn(count, HIDDEN, dtype=torch.float64, generator=generator)
            indices = torch.randint(0, 3, (count, 2), generator=generator)
            weights = torch.rand(count, 2, dtype=torch.float64, generator=generator)
            results.clear()
            for in_one in (True, False):
                if not in_one:
                    layer.gated_experts = lambda: None  # type: ignore[method-assign]
                leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_(), *layer.parameters()]
                out = layer(leaves[0], indices, leaves[1])
                grads = torch.autograd.grad(out.square().sum(), leaves)
                results.append([out, *(grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads)])
            vars(layer).pop("gated_experts")
            for one, two in zip(*results, strict=True):
                assert torch.equal(one, two)

    run_threads(3, body)
