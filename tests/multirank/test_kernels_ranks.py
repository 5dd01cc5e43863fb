"""Kernels over Gloo: the loss with its classes cut, compiled and refused, and a sharded model that has all of them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttrain
from disttrain.compiling import compile_blocks
from disttrain.dtensor import CommDebugMode
from disttrain.errors import BackendError, ShapeError
from disttrain.fsdp2 import fully_shard
from disttrain.kernels import AdamW, linear_cross_entropy, loss_from_head, use_kernels
from disttrain.pieces import piece
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.kernels import drawn
from tests.cases.shardings import mesh_of

NUM_CLASSES = 7
TARGET = torch.tensor([0, 3, -100, 6, 2])
HIDDEN, WEIGHT = drawn(5, 4).float(), drawn(NUM_CLASSES, 4, seed=1).float()


def part(whole: torch.Tensor) -> torch.Tensor:
    size, first = piece(len(whole), disttrain.get_world_size(), disttrain.get_rank())
    return whole.narrow(0, first, size)


@pytest.mark.sweep(1)
@on_ranks(2, timeout_s=360)
@pytest.mark.parametrize(("reduction", "backend"), [("none", "aot_eager"), ("mean", "inductor")])
def test_compiled_steps(reduction: str, backend: str) -> None:
    torch._dynamo.reset()
    mesh = mesh_of((2,))

    def step(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(
            hidden.sin(), weight, TARGET, group=mesh, vocab_size=NUM_CLASSES, reduction=reduction
        ).sum()

    leaves = [HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()]
    wished = F.cross_entropy(F.linear(leaves[0].sin(), leaves[1]), TARGET, reduction=reduction).sum()
    wished.backward()
    for run in (step, torch.compile(step, backend=backend, fullgraph=True)):
        own = [HIDDEN.clone().requires_grad_(), part(WEIGHT).clone().requires_grad_()]
        with CommDebugMode() as comms:
            loss = run(*own)
            loss.backward()
        assert comms.get_comm_counts() == {"all_gather_into_tensor": 1, "all_reduce": 1}
        torch.testing.assert_close(loss, wished.detach())
        torch.testing.assert_close(own[0].grad, leaves[0].grad)
        torch.testing.assert_close(own[1].grad, part(leaves[1].grad))


@on_ranks(2)
def test_what_one_rank_refuses_the_other_does_not_wait_for() -> None:
    mesh, weight = mesh_of((2,)), part(WEIGHT)
    if disttrain.get_rank():
        with pytest.raises(ShapeError, match="Give a weight"):
            linear_cross_entropy(HIDDEN, weight[1:], TARGET, group=mesh, vocab_size=NUM_CLASSES)
    else:
        with pytest.raises(BackendError, match="rank 1 refused linear_cross_entropy: hidden has shape"):
            linear_cross_entropy(HIDDEN, weight, TARGET, group=mesh, vocab_size=NUM_CLASSES)


class Block(nn.Module):
    """A gated layer on a residual path between two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last_norm = nn.RMSNorm(6), nn.LayerNorm(6)
        self.gate, self.up, self.down = nn.Linear(6, 10), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return self.last_norm(x + self.down(F.silu(self.gate(y)) * self.up(y)))


class Model(nn.Module):
    """With its loss, or without."""

    def __init__(self, gives_loss: bool = True) -> None:
        super().__init__()
        self.gives_loss = gives_loss
        self.embedding, self.blocks = nn.Embedding(11, 6), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) if self.gives_loss else logits


@on_ranks(1, 3)
def test_a_sharded_model_with_kernels_trains_as_a_whole_one_without() -> None:
    check_sharded(is_compiled=False)


@on_ranks(2)
def test_a_compiled_sharded_model_with_kernels_trains_as_a_whole_one_without() -> None:
    check_sharded(is_compiled=True)


def check_sharded(*, is_compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    whole = Model()
    model = copy.deepcopy(whole)
    assert len(use_kernels(model, report=lambda _: None)) == 9
    if is_compiled:
        assert len(compile_blocks(model, backend="aot_eager").kinds) == 1
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=0.02, max_norm=0.1)
    wished = torch.optim.AdamW(whole.parameters(), lr=0.02)
    num_ranks, rank = disttrain.get_world_size(), disttrain.get_rank()
    for step in range(3):
        tokens = torch.randint(0, 11, (6, 5), generator=torch.Generator().manual_seed(step))
        model(tokens.chunk(num_ranks)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        whole(tokens).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        wished.step()
        wished.zero_grad()
    for own, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.full_tensor(), other, atol=1e-5, rtol=1e-4)


@on_ranks(2)
@pytest.mark.parametrize("is_head_apart", [False, True])
def test_a_sharded_model_s_head_gives_the_loss(is_head_apart: bool) -> None:
    torch.manual_seed(0)
    whole = Model(gives_loss=False)
    model = copy.deepcopy(whole)
    if is_head_apart:
        fully_shard(model.head)
    fully_shard(model)
    tokens = torch.randint(0, 11, (6, 5), generator=torch.Generator().manual_seed(0))
    own = tokens.chunk(2)[disttrain.get_rank()]
    with loss_from_head(model.head, own, label_smoothing=0.1):
        model(own).backward()
    F.cross_entropy(whole(tokens).flatten(0, 1), tokens.flatten(), label_smoothing=0.1).backward()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)
    assert model(own).shape == (3, 5, 11)
    with pytest.raises(ShapeError, match="the head is a Embedding"), loss_from_head(model.embedding, own):
        pass
