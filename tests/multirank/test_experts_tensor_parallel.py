"""Experts whose hidden dims are cut over an axis: outputs and gradients of transformers' experts in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import disttrain
from disttrain import tp
from disttrain.dtensor import DTensor
from disttrain.errors import ShardingError
from disttrain.experts import Experts, ExpertTensorParallel, MixtureOfExperts, shard_experts, use_experts
from disttrain.fsdp2 import fully_shard
from disttrain.testing import run_threads
from tests.cases.expert_layers import HIDDEN, judge, ours, tokens
from tests.cases.expert_transformers import expert_model, loss_of, sentences


def full(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_layer(name: str, shape: tuple[int, int, int], cuts_tokens: bool, tp_first: bool, is_sharded: bool) -> None:
    mesh = disttrain.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep", "tp"))
    theirs = judge(name, 5)
    mine = ours(theirs)
    if tp_first:
        tp.parallelize_module(mine, mesh["tp"], ExpertTensorParallel(cuts_tokens=cuts_tokens))
        shard_experts(mine, mesh["ep"])
    else:
        shard_experts(mine, mesh["ep"], tp=mesh["tp"], cuts_tokens=cuts_tokens)
    data = mesh["dp", "ep"]._flatten("fsdp")
    if is_sharded:
        fully_shard(mine, mesh=data)
    own, num_tp, tp_rank = data.get_local_rank(), shape[2], mesh["tp"].get_local_rank()

    def part(whole: torch.Tensor) -> torch.Tensor:
        of_data = whole.chunk(data.size())[own]
        return of_data.chunk(num_tp)[tp_rank] if cuts_tokens else of_data

    x, indices, weights = map(torch.cat, zip(*(tokens(rank, 6, 2, 5) for rank in range(data.size())), strict=True))
    mine_x, mine_weights = (part(whole).clone().requires_grad_() for whole in (x, weights))
    out = mine(mine_x, part(indices), mine_weights)
    out.square().sum().backward()
    x.requires_grad_()
    weights.requires_grad_()
    expected = theirs(x, indices, weights)
    expected.square().sum().backward()
    for found, whole in ((out, expected), (mine_x.grad, x.grad), (mine_weights.grad, weights.grad)):
        torch.testing.assert_close(found, part(whole))
    for at, parameter in mine.named_parameters():
        torch.testing.assert_close(full(parameter.data), theirs.get_parameter(at).data)
        # Without fully_shard nobody sums over dp.
        if is_sharded or shape[0] == 1:
            grad = full(parameter.grad) * (data.size() if is_sharded else 1)
            torch.testing.assert_close(grad, theirs.get_parameter(at).grad, msg=lambda text, at=at: f"{at}: {text}")


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("cuts_tokens", [False, True])
def test_hidden_dims_are_cut(name: str, shape: tuple[int, int, int], cuts_tokens: bool) -> None:
    for tp_first, is_sharded in ((False, False), (True, True)):
        run_threads(4, check_layer, name, shape, cuts_tokens, tp_first, is_sharded)


def check_model(models: list[nn.Module], wholes: list[nn.Module], num_copies: int) -> None:
    rank = disttrain.get_rank()
    model, whole = models[rank], wholes[rank]
    names = ("replicate", "dp", "ep", "tp")
    mesh = disttrain.init_device_mesh("cpu", (num_copies, 1, 2, 2), mesh_dim_names=names)
    use_experts(model, report=lambda _: None)
    tp.parallelize_module(model, mesh["tp"], tp.plan_for(model))
    shard_experts(model, mesh["ep"])
    data = mesh["dp", "ep"]._flatten("fsdp")
    part = mesh["replicate"].get_local_rank() * 2 + data.get_local_rank()
    if num_copies > 1:
        data = mesh["replicate", "fsdp"]
    for block in model.model.layers:
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    mine, theirs = (torch.optim.AdamW(each.parameters(), lr=0.02) for each in (model, whole))
    for step in range(2):
        batch = sentences(step)
        loss_of(model, batch.chunk(2 * num_copies)[part]).backward()
        loss_of(whole, batch).backward()
        for at, parameter in model.named_parameters():
            # Routers of transformers compute in fp32, which other orders of sums round otherwise.
            torch.testing.assert_close(full(parameter.grad), whole.get_parameter(at).grad, rtol=1e-5, atol=1e-6)
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (model, whole)]
        torch.testing.assert_close(full(norms[0]), norms[1], rtol=1e-5, atol=1e-6)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for at, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter.data), whole.get_parameter(at).data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "num_copies"), [("mixtral", 1), ("deepseek_v3", 1), ("qwen3_moe", 2)])
def test_a_plan_cuts_a_models_experts(name: str, num_copies: int) -> None:
    whole, num_ranks = expert_model(name, 3), 4 * num_copies
    models = ([copy.deepcopy(whole) for _ in range(num_ranks)] for _ in range(2))
    run_threads(num_ranks, check_model, *models, num_copies)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, 3, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.linear(x)
        return logits, *logits.softmax(-1).topk(2)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.mixture = MixtureOfExperts(Router(), Experts(3, HIDDEN, 8), Shared())
        self.head = nn.Linear(HIDDEN, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        return self.head(x + self.mixture(self.norm(x)))


def check_sequences(whole: nn.Module) -> None:
    mesh = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    model, whole = copy.deepcopy(whole), copy.deepcopy(whole)
    tp.parallelize_module(model, mesh["tp"], tp.plan_for(model))
    shard_experts(model, mesh["ep"])
    fully_shard(model, mesh=mesh["ep"])
    batch = sentences(0)
    out, expected = model(batch.chunk(2)[mesh["ep"].get_local_rank()]), whole(batch)
    torch.testing.assert_close(out, expected.chunk(2)[mesh["ep"].get_local_rank()])
    out.square().mean().backward()
    expected.square().mean().backward()
    for at, parameter in model.named_parameters():
        grad = whole.get_parameter(at).grad
        torch.testing.assert_close(full(parameter.grad), grad, msg=lambda text, at=at: f"{at}: {text}")


def test_a_plan_cuts_sequences_before_experts() -> None:
    torch.manual_seed(0)
    whole = Decoder().double()
    plan = tp.plan_for(whole)
    assert {"mixture.router", "mixture.experts", "mixture.shared_experts.up"} <= set(plan)
    assert "mixture.router.linear" not in plan
    assert "each expert's hidden dim, tokens cut" in str(plan)
    run_threads(4, check_sequences, whole)


def check_refusals() -> None:
    mesh = disttrain.init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep", "tp"))
    layer = Experts(2, HIDDEN, 5)
    before = dict(layer.named_parameters())
    with pytest.raises(ShardingError, match="a hidden dim of 5, and the axis has 2 ranks"):
        shard_experts(layer, mesh["ep"], tp=mesh["tp"])
    assert all(layer.get_parameter(name) is parameter for name, parameter in before.items())
    layer = Experts(2, HIDDEN, 8)
    shard_experts(layer, mesh["ep"], tp=mesh["tp"])
    with pytest.raises(ShardingError, match="is cut along its hidden dim already"):
        ExpertTensorParallel()._apply(layer, mesh["tp"])


def test_what_cannot_be_cut_is_refused_before_anything_is_changed() -> None:
    run_threads(2, check_refusals)
