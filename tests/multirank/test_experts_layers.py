"""Layers of experts in training over ranks: shared experts, checkpoints, drops, messages, and ranks that fail."""

from __future__ import annotations

import copy
import inspect
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.errors import CollectiveMismatchError, MeshError, ShapeError, ShardingError
from disttrain.experts import (
    Experts,
    ExpertTensorParallel,
    MixtureOfExperts,
    combine,
    dispatch,
    faults,
    shard_experts,
)
from disttrain.mesh import DeviceMesh
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.expert_layers import HIDDEN, INTER, JUDGES, block, judge, our_block, ours, tokens


class Router(nn.Module):
    """The form of transformers' routers."""

    def __init__(self, num_experts: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.linear = nn.Linear(HIDDEN, num_experts, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.linear(x)
        return logits, *logits.softmax(-1).topk(self.k)


def mixture(num_experts: int = 5, k: int = 2, *, shared: bool = True) -> MixtureOfExperts:
    torch.manual_seed(0)
    router, experts = Router(num_experts, k), Experts(num_experts, HIDDEN, INTER)
    return MixtureOfExperts(router, experts, nn.Linear(HIDDEN, HIDDEN) if shared else None).double()


class Model(nn.Module):
    def __init__(self, *, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([mixture(shared=False), mixture()])
        self.head = nn.Linear(HIDDEN, HIDDEN).double()
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.blocks:
            ran = layer(x) if self.checkpointed is None else checkpoint(layer, x, use_reentrant=self.checkpointed)
            x = x + ran
        return self.head(x)


def ep_mesh() -> DeviceMesh:
    return disttrain.init_device_mesh("cpu", (disttrain.get_world_size(),), mesh_dim_names=("ep",))["ep"]


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


def failing(model: MixtureOfExperts, how: str) -> Any:
    """The call of one rank that fails."""
    x = torch.randn(3, HIDDEN, dtype=torch.float64)
    if how == "router raises":
        model.router.register_forward_hook(lambda *_: 1 / 0)
    if how == "shared experts raise":
        model.shared_experts.register_forward_hook(lambda *_: 1 / 0)
    if how == "wrong width":
        model.router.linear = nn.Linear(HIDDEN + 1, 5).double()
        x = torch.randn(3, HIDDEN + 1, dtype=torch.float64)
    return lambda: model(x)


@on_ranks(2, 3, timeout_s=30)
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("router raises", "division by zero"),
        ("shared experts raise", "division by zero"),
        ("wrong width", f"x has {HIDDEN + 1} columns, and the experts take {HIDDEN}"),
    ],
)
def test_nobody_waits_for_a_rank_that_raises(how: str, text: str) -> None:
    model = shard_experts(mixture(), ep_mesh())
    disttrain.barrier()
    since_s = time.monotonic()
    if disttrain.get_rank() == 1:
        with pytest.raises((ShapeError, ZeroDivisionError), match=text):
            failing(model, how)()
        time.sleep(1)
    else:
        with pytest.raises(CollectiveMismatchError, match=f"rank 1 refused experts: .*{text}"):
            model(torch.randn(3, HIDDEN, dtype=torch.float64))
    assert time.monotonic() - since_s < 10


@on_ranks(2, timeout_s=30)
def test_nobody_waits_in_backward_for_a_rank_whose_forward_has_raised() -> None:
    model = shard_experts(Model(), ep_mesh())
    x = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    disttrain.barrier()
    since_s = time.monotonic()
    if disttrain.get_rank() == 1:
        model.head.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
        time.sleep(1)
    else:
        loss = model(x).sum()
        with pytest.raises(CollectiveMismatchError, match=r"rank 1 refused experts: .*division by zero"):
            loss.backward()
    assert time.monotonic() - since_s < 10


@on_ranks(2)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_all_ranks_raise_for_weights_of_one_that_are_not_finite(bad: float) -> None:
    layer = shard_experts(ours(judge("mixtral", 4)), ep_mesh())
    x, indices, weights = tokens(0, 3, 2, 4)
    if disttrain.get_rank() == 1:
        weights[1, 0] = bad
    with pytest.raises(ShapeError, match="on rank 1 are not all finite"):
        layer(x, indices, weights)
    # The group goes on.
    weights[:] = 1
    assert layer(x, indices, weights).isfinite().all()


@on_ranks(2)
def test_bad_input_raises_alike_on_all_ranks() -> None:
    layer = shard_experts(ours(judge("mixtral", 4)), ep_mesh())
    x, indices, weights = tokens(0, 3, 2, 4)
    for arguments, text in (
        ((x, indices.double(), weights), "indices are torch.float64 of shape"),
        ((x, indices[:2], weights[:2]), "for x of 3 tokens"),
        ((x, indices, weights[:, :1]), r"weights are .* \(3, 1\) for indices of shape \(3, 2\)"),
        ((x[None], indices, weights), r"x is torch.float64 of shape \(1, 3, 12\)"),
        ((x, indices[:, :0], weights[:, :0]), "each token has 0 experts"),
        ((x, indices.repeat(1, 3), weights.repeat(1, 3)), "each token has 6 experts, and there are 4"),
    ):
        with pytest.raises(ShapeError, match=text):
            layer(*arguments)
    assert layer(x, indices, weights).isfinite().all()


def test_meshes_and_modules_that_do_not_fit() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
        layer = ours(judge("mixtral", 4))
        with pytest.raises(MeshError, match=r"has 2 axes\. Give the one axis along which experts lie"):
            shard_experts(layer, mesh)
        with pytest.raises(MeshError, match="the mesh is None"):
            shard_experts(layer, None)
        with pytest.raises(ShapeError, match="exchange is 'mail'"):
            shard_experts(layer, mesh["dp"], exchange="mail")
        for capacity in (-1, 0, float("nan"), float("inf"), "much"):
            with pytest.raises(ShardingError, match=f"capacity is {capacity!r}"):
                shard_experts(layer, mesh["dp"], capacity=capacity)
            with pytest.raises(ShapeError, match=f"capacity is {capacity!r}"):
                dispatch(*tokens(0, 3, 2, 4)[:2], 4, mesh["dp"], capacity)
        with pytest.raises(ShardingError, match="Linear has no experts"):
            shard_experts(nn.Linear(2, 2), mesh["dp"])
        shard_experts(layer, mesh["dp"])
        with pytest.raises(ShardingError, match=r"is (divided|a DTensor) already"):
            shard_experts(layer, mesh["dp"])

    run_threads(2, body)


@on_ranks(2, 3, timeout_s=30)
@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (lambda mesh: shard_experts(nn.Linear(2, 2), mesh), "Linear has no experts"),
        (lambda mesh: shard_experts(Model(), mesh, capacity=0), "capacity is 0"),
        (lambda mesh: ExpertTensorParallel().apply_to(Experts(4, 6, 7), mesh, 0), "a hidden dim of 7"),
    ],
)
def test_nobody_waits_for_a_rank_that_refuses_to_divide(bad: Any, text: str) -> None:
    mesh, since_s = ep_mesh(), time.monotonic()
    if disttrain.get_rank() == 1:
        with pytest.raises(ShardingError, match=text):
            bad(mesh)
        time.sleep(1)
    else:
        with pytest.raises(CollectiveMismatchError, match=f"rank 1 refused experts: .*{text}"):
            shard_experts(Model(), mesh)
    assert time.monotonic() - since_s < 10


@on_ranks(2)
def test_room_that_is_too_small_later() -> None:
    layer = shard_experts(ours(judge("mixtral", 4)), ep_mesh(), exchange="padded")
    layer(*tokens(disttrain.get_rank(), 3, 2, 4))
    with pytest.raises(ShapeError, match="8 rows may go to one rank, and there is room for 6"):
        layer(*tokens(disttrain.get_rank(), 4, 2, 4))
