"""Routing over Gloo: losses over the whole batch and the bias's update against one process; errors of one rank."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.errors import BackendError, MeshError, RoutingError, ShapeError
from disttrain.experts import (
    Balance,
    Router,
    RouterRule,
    balance_loss,
    choose,
    read_statistics,
    update_expert_biases,
    z_loss,
)
from disttrain.fsdp2 import fully_shard
from disttrain.mesh import init_device_mesh
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.kernels import drawn
from tests.cases.shardings import mesh_of

HIDDEN = 6
SIZES = (7, 0, 4)
"""Tokens of each rank."""
RULE = RouterRule(5, 2, score="sigmoid", scale=2.0)


def own_tokens(*, of_all: torch.Tensor) -> torch.Tensor:
    rank = disttrain.get_rank()
    return of_all[sum(SIZES[:rank]) : sum(SIZES[: rank + 1])]


def tokens_of_all() -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' tokens, and which of them count."""
    num_tokens = sum(SIZES[: disttrain.get_world_size()])
    x = drawn(num_tokens, HIDDEN)
    return x, torch.arange(num_tokens) % 3 != 1


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
def test_losses_over_the_whole_batch(has_mask: bool, is_compiled: bool) -> None:
    world_size = disttrain.get_world_size()
    if is_compiled and (world_size != 2 or has_mask):
        return  # a compilation takes seconds
    torch._dynamo.reset()
    mesh = mesh_of((world_size,))
    x, counted = tokens_of_all()
    mask = counted if has_mask else None
    router = Router(
        HIDDEN, RULE, Balance(aux_loss_coeff=0.3, z_loss_coeff=0.2, over="batch"), batch_axis=mesh, dtype=x.dtype
    )
    with torch.no_grad():
        router.weight.copy_(drawn(5, HIDDEN, seed=2))
    weight = router.weight.detach().clone().requires_grad_()
    routing = choose(x @ weight.T, RULE, mask=mask)
    losses = balance_loss(routing, RULE, mask=mask), z_loss(routing, RULE, mask=mask)
    factors = drawn(len(x), 2, seed=3)
    ((routing.weights * factors).sum() / len(x) + 0.3 * losses[0] + 0.2 * losses[1]).backward()

    run = torch.compile(router, backend="aot_eager", fullgraph=True) if is_compiled else router
    part_mask = None if mask is None else own_tokens(of_all=mask)
    part = run(own_tokens(of_all=x), part_mask)
    # The model's own loss, of which data parallel takes the mean over ranks.
    (world_size * (part.weights * own_tokens(of_all=factors)).sum() / len(x)).backward()
    grad = router.weight.grad
    assert grad is not None
    disttrain.all_reduce(grad)
    torch.testing.assert_close(grad / world_size, weight.grad)

    told = read_statistics(router, mesh)[""]
    counts = routing.indices.flatten().bincount(minlength=6).tolist()[:5]
    assert told.tokens_per_expert == tuple(counts)
    assert told.num_tokens == (len(x) if mask is None else int(mask.sum()))
    assert told.balance_loss == pytest.approx(losses[0].item(), rel=1e-5)
    assert told.z_loss == pytest.approx(losses[1].item(), rel=1e-5)


@on_ranks(2, 3)
def test_losses_of_sequences_that_are_cut_along_positions() -> None:
    world_size, rank = disttrain.get_world_size(), disttrain.get_rank()
    mesh = mesh_of((world_size,))
    logits = drawn(2, 3 * world_size, 5).requires_grad_()
    part = logits.detach()[:, 3 * rank : 3 * (rank + 1)].clone().requires_grad_()
    for loss in (balance_loss, z_loss):
        logits.grad = part.grad = None
        wanted = loss(choose(logits.flatten(0, 1), RULE), RULE, num_sequences=2)
        wanted.backward()
        ours = loss(choose(part.flatten(0, 1), RULE), RULE, num_sequences=2, axis=mesh)
        ours.backward()
        torch.testing.assert_close(ours, wanted)
        assert logits.grad is not None
        assert part.grad is not None
        torch.testing.assert_close(part.grad / world_size, logits.grad[:, 3 * rank : 3 * (rank + 1)])


@on_ranks(2, 3)
def test_biases_are_updated_by_the_tokens_of_all_ranks() -> None:
    world_size = disttrain.get_world_size()
    mesh = mesh_of((world_size,))
    x, _ = tokens_of_all()

    def model_of(axis: Any) -> nn.ModuleList:
        torch.manual_seed(3)
        balance = Balance(bias_update_rate=0.1)
        return nn.ModuleList(
            Router(HIDDEN, RouterRule(num_experts, 2, score="sigmoid"), balance, batch_axis=axis, dtype=x.dtype)
            for num_experts in (5, 7)
        )

    ours, wanted = model_of(mesh), model_of(None)
    by_argument, has_moved = model_of(None), False
    for _ in range(3):
        for router, same, alone in zip(ours, by_argument, wanted, strict=True):
            for microbatch in own_tokens(of_all=x).chunk(2):
                router(microbatch)
                same(microbatch)
            alone(x)
        update_expert_biases(ours)
        update_expert_biases(by_argument, mesh)
        update_expert_biases(wanted)
        for router, same, alone in zip(ours, by_argument, wanted, strict=True):
            has_moved |= bool(alone.expert_bias.any())
            assert torch.equal(router.expert_bias, alone.expert_bias)
            assert torch.equal(same.expert_bias, alone.expert_bias)
    assert has_moved


@on_ranks(2, 3)
def test_nan_on_one_rank_is_an_error_on_all() -> None:
    mesh = mesh_of((disttrain.get_world_size(),))
    router = Router(HIDDEN, RULE, expert_axis=mesh)
    x = drawn(3, HIDDEN).float()
    router(x)
    if disttrain.get_rank() == 1:
        x[2] = math.nan
    own = "1 of 3 tokens have" if disttrain.get_rank() == 1 else "tokens of rank 1 have"
    with pytest.raises(RoutingError, match=rf"choose: {own} nan .* \[rank {disttrain.get_rank()}\]"):
        router(x)
    router(drawn(3, HIDDEN).float())  # the group goes on


@on_ranks(2)
def test_nan_that_nobody_waited_for_is_told_on_all_ranks() -> None:
    torch._dynamo.reset()
    mesh = mesh_of((2,))
    model = nn.ModuleDict({"gate": Router(HIDDEN, RULE, expert_axis=mesh)})
    x = drawn(3, HIDDEN).float()
    if disttrain.get_rank() == 1:
        x[2] = math.nan
    torch.compile(model["gate"], backend="aot_eager", fullgraph=True)(x)
    with pytest.raises(RoutingError, match=rf"tokens had nan in the scores of gate.* \[rank {disttrain.get_rank()}\]"):
        read_statistics(model, mesh)


@on_ranks(2)
def test_tokens_of_the_wrong_width_on_one_rank() -> None:
    mesh = mesh_of((2,))
    router = Router(HIDDEN, RULE, expert_axis=mesh)
    if disttrain.get_rank():
        with pytest.raises(ShapeError, match=r"tokens have shape \(3, 5\)"):
            router(torch.zeros(3, 5))
    else:
        with pytest.raises(BackendError, match="rank 1 refused Router: tokens have shape"):
            router(torch.zeros(3, HIDDEN))


class Block(nn.Module):
    """Tokens times a number of each of their experts."""

    def __init__(self, axis: Any) -> None:
        super().__init__()
        balance = Balance(aux_loss_coeff=0.3, z_loss_coeff=0.2, over="batch", bias_update_rate=0.1)
        self.router = Router(HIDDEN, RULE, balance, batch_axis=axis, dtype=torch.float64)
        self.factors = nn.Parameter(drawn(5, HIDDEN, seed=4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, indices, *_ = self.router(x)
        return x + (self.factors[indices] * weights[..., None]).sum(-2).view_as(x)


def blocks_of(axis: Any) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Block(axis), Block(axis))


@on_ranks(2, 3)
@pytest.mark.parametrize("recomputes", [False, True])
def test_sharded_models_train_as_one_process_does(recomputes: bool) -> None:
    size, rank = disttrain.get_world_size(), disttrain.get_rank()
    mesh = mesh_of((size,))
    ours, wanted = copy.deepcopy(blocks_of(mesh)), blocks_of(None)
    for block in ours:
        fully_shard(block, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, wanted)]
    for step in range(3):
        x = drawn(4 * size, HIDDEN, seed=10 + step)
        out = x[4 * rank : 4 * (rank + 1)]
        for block in ours:
            out = checkpoint(block, out, use_reentrant=False) if recomputes else block(out)
        losses = out.square().mean(), wanted(x).square().mean()
        for loss, optimizer, model in zip(losses, optimizers, (ours, wanted), strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            update_expert_biases(model)
        for parameter, other in zip(ours.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(parameter.full_tensor(), other)
        assert [*read_statistics(ours, mesh).values()] == [
            replace(
                told,
                entropy=pytest.approx(told.entropy),
                balance_loss=pytest.approx(told.balance_loss),
                z_loss=pytest.approx(told.z_loss),
            )
            for told in read_statistics(wanted).values()
        ]
    for block, other in zip(ours, wanted, strict=True):
        assert torch.equal(block.router.expert_bias, other.router.expert_bias)


@on_ranks(2)
def test_an_axis_is_one_axis() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
    router = Router(HIDDEN, RULE, Balance(aux_loss_coeff=0.1, over="batch"), batch_axis=mesh["dp"])
    router(drawn(3, HIDDEN).float())
    for options in ({"batch_axis": mesh}, {"expert_axis": mesh}):
        with pytest.raises(MeshError, match="2 axes"):
            Router(HIDDEN, RULE, **options)
