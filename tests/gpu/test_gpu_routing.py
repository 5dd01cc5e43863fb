"""Routing on GPUs: as on CPUs, without a word of the host, and within a captured step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.compiling import capture_step
from disttrain.errors import RoutingError
from disttrain.experts import (
    Balance,
    Router,
    RouterRule,
    balance_loss,
    choose,
    read_statistics,
    update_expert_biases,
    weights_before_experts,
)
from disttrain.experts.routing.rule import SCORES
from disttrain.mesh import init_device_mesh
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.kernels import drawn
from tests.gpu.ranks import NUM_GPU_RANKS

HIDDEN = 64


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("num_experts", "num_groups"), [(8, 1), (256, 8)])
def test_choices_are_those_of_cpus(num_experts: int, num_groups: int, score: str) -> None:
    rule = RouterRule(num_experts, 4, score=score, num_groups=num_groups, top_groups=max(1, num_groups // 2))
    # Few values, so that many are equal.
    logits = torch.randint(-2, 3, (500, num_experts), generator=torch.Generator().manual_seed(0)).double()
    on_cpu, on_gpu = choose(logits, rule), choose(logits.cuda(), rule)
    assert torch.equal(on_gpu.indices.cpu(), on_cpu.indices)
    torch.testing.assert_close(on_gpu.weights.cpu(), on_cpu.weights)


class Training:
    """Two routers, and what depends on their choices."""

    def __init__(self, *, recomputes: bool) -> None:
        torch.manual_seed(0)
        balance = Balance(aux_loss_coeff=0.1, z_loss_coeff=0.01, bias_update_rate=0.01)
        rules = RouterRule(8, 2, score="sigmoid", num_groups=4, top_groups=2), RouterRule(5, 1)
        self.model = nn.ModuleList(Router(HIDDEN, rule, balance) for rule in rules).cuda()
        self.experts = torch.randn(8, HIDDEN, device="cuda")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.recomputes = recomputes

    def layer(self, router: nn.Module, x: torch.Tensor) -> torch.Tensor:
        routing = router(x)
        rows, indices, _ = weights_before_experts(x, routing)
        return x + (rows * self.experts[indices[:, 0]]).view(len(x), -1, HIDDEN).sum(1)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        for router in self.model:
            x = checkpoint(self.layer, router, x, use_reentrant=False) if self.recomputes else self.layer(router, x)
        loss = x.square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        update_expert_biases(self.model)
        return loss.detach()


def losses(training: Training, step: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    return [step(drawn(33, HIDDEN, seed=seed).float().cuda()).item() for seed in range(9)]


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_captured_step_trains_and_counts_as_one_that_is_not(recomputes: bool) -> None:
    plain, captured = Training(recomputes=False), Training(recomputes=recomputes)
    step = capture_step(captured.step)
    assert losses(captured, step) == pytest.approx(losses(plain, plain.step), rel=1e-5)
    assert step.num_graphs == 1
    told = read_statistics(captured.model)
    assert [sum(each.tokens_per_expert) for each in told.values()] == [9 * 33 * 2, 9 * 33]
    assert [each.tokens_per_expert for each in told.values()] == [
        each.tokens_per_expert for each in read_statistics(plain.model).values()
    ]
    for ours, wanted in zip(captured.model.buffers(), plain.model.buffers(), strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_does_not_wait_for_the_device() -> None:
    training = Training(recomputes=False)
    x = drawn(33, HIDDEN).float().cuda()
    training.step(x)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.step(x)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_nan_is_told_at_the_reading() -> None:
    router = Router(HIDDEN, RouterRule(8, 2)).cuda()
    x = drawn(5, HIDDEN).float().cuda()
    x[3, 0] = math.nan
    routing = router(x)
    assert routing.weights.isnan().any(1).tolist() == [False, False, False, True, False]
    assert routing.indices.min() >= 0
    assert routing.indices.max() < 8
    with pytest.raises(RoutingError, match="tokens had nan in the scores"):
        read_statistics(router)


@pytest.mark.filterwarnings("ignore")
def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    x = drawn(33, HIDDEN).float().cuda()
    results: list[Any] = []
    for is_compiled in (False, True):
        training = Training(recomputes=False)
        router = training.model[0]
        run = torch.compile(router, fullgraph=True) if is_compiled else router
        run(x).weights.square().sum().backward()
        results.append((router.weight.grad, read_statistics(router)[""].tokens_per_expert))
    torch.testing.assert_close(results[1], results[0])


@on_ranks(NUM_GPU_RANKS)
def test_losses_over_the_whole_batch() -> None:
    size, rank = disttrain.get_world_size(), disttrain.get_rank()
    mesh = init_device_mesh("cuda", (size,), mesh_dim_names=("dp",))
    x, rule = drawn(6 * size, HIDDEN).cuda(), RouterRule(8, 2)
    weight = drawn(8, HIDDEN, seed=2).cuda().requires_grad_()
    balance_loss(choose(x @ weight.T, rule), rule).backward()
    own = weight.detach().clone().requires_grad_()
    balance_loss(choose(x[6 * rank : 6 * (rank + 1)] @ own.T, rule), rule, axis=mesh).backward()
    assert own.grad is not None
    disttrain.all_reduce(own.grad)
    torch.testing.assert_close(own.grad / size, weight.grad)
