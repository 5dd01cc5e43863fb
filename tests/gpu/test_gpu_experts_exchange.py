"""Experts over GPUs: each way to exchange rows has the values of one that has all experts."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain.compiling import capture_step
from disttrain.errors import CompileError
from disttrain.experts import Experts, MixtureOfExperts, shard_experts
from disttrain.experts.exchange.peers import Peers
from disttrain.process_group import ProcessGroup
from disttrain.process_group._c10d import SharedMemory
from disttrain.process_group.peers.memory import share_memory
from disttrain.store import PrefixStore
from disttrain.testing.pytest_plugin import on_ranks
from tests.gpu.ranks import NUM_GPU_RANKS

HIDDEN, INTER, TOKENS, K = 256, 128, 200, 2
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class Router(nn.Module):
    """The form of transformers' routers."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, num_experts, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.linear(x)
        return logits, *logits.softmax(-1).topk(K)


def mixture(num_experts: int) -> MixtureOfExperts:
    torch.manual_seed(0)
    model = MixtureOfExperts(Router(num_experts), Experts(num_experts, HIDDEN, INTER), nn.Linear(HIDDEN, HIDDEN))
    return model.cuda()


class Memories:
    """Memory between the ranks, also of those that share a GPU, which the library takes for ranks of several hosts."""

    def __init__(self) -> None:
        self.num_made = 0

    def make(self, group: ProcessGroup, device: torch.device, num_bytes: int) -> Any:
        if group.group_size <= torch.cuda.device_count():
            return share_memory(group, device, num_bytes)
        os.environ[OVERLAPPING] = "1"
        self.num_made += 1
        name = f"experts/{group.group_name}/{self.num_made}"
        store = PrefixStore(name, group.world.store)
        return SharedMemory(name, group.group_rank, group.group_size, store, num_bytes, device)


def sharded(model: MixtureOfExperts, way: str) -> MixtureOfExperts:
    mesh = disttrain.init_device_mesh("cuda", (disttrain.get_world_size(),), mesh_dim_names=("ep",))
    shard_experts(model, mesh, exchange="auto" if way == "peers" else way)
    if way == "peers" and mesh.size() > 1:
        model.experts.exchange = Peers(mesh.get_group(), make_memory=Memories().make)
    return model


def tokens(step: int, rank: int, num_tokens: int = TOKENS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(num_tokens, HIDDEN, generator=generator).cuda()


@on_ranks(NUM_GPU_RANKS, timeout_s=200)
@pytest.mark.parametrize("way", ["all_to_all", "padded", "peers"])
@pytest.mark.parametrize("num_experts", [8, 5, 2])
def test_values(num_experts: int, way: str) -> None:
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    alone = mixture(num_experts)
    model = sharded(copy.deepcopy(alone), way)
    for step in range(5):
        # In one step a rank has no tokens, in another all go to one expert.
        counts = [0 if step == 1 and other == size - 1 else TOKENS for other in range(size)]
        if step == 2:
            for each in (alone, model):
                each.router.linear.weight.data.zero_()
        own = tokens(step, rank, counts[rank]).requires_grad_()
        whole = torch.cat([tokens(step, other, counts[other]) for other in range(size)]).requires_grad_()
        out, expected = model(own), alone(whole)
        out.square().sum().backward()
        expected.square().sum().backward()
        part = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        torch.testing.assert_close(out, expected[part], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(own.grad, whole.grad[part], rtol=2e-3, atol=2e-3)
        wanted = dict(alone.experts.named_parameters())
        for name, parameter in model.experts.named_parameters():
            scale = wanted[name].grad.abs().max().item()
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name].grad, rtol=2e-3, atol=2e-3 * scale)
        model.zero_grad()
        alone.zero_grad()


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


@on_ranks(NUM_GPU_RANKS, timeout_s=200)
@pytest.mark.parametrize("way", ["padded", "peers"])
def test_captured_steps(way: str) -> None:
    losses = []
    for is_captured in (False, True):
        model = sharded(mixture(6), way)
        step: Any = step_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if is_captured:
            step = capture_step(step)
        losses.append([step(tokens(index, disttrain.get_rank())).item() for index in range(12)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@on_ranks(NUM_GPU_RANKS, timeout_s=200)
def test_sizes_that_the_host_reads_cannot_be_captured() -> None:
    model = sharded(mixture(6), "all_to_all")
    step = capture_step(step_of(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    if disttrain.get_world_size() == 1:
        return
    for index in range(3):
        step(tokens(index, disttrain.get_rank()))
    with pytest.raises(CompileError, match="the host reads the sizes"):
        step(tokens(3, disttrain.get_rank()))
