"""Layers of random experts, routers, tokens and meshes compute what a loop over tokens computes in fp64."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.dtensor import DTensor
from disttrain.experts import Experts, MixtureOfExperts, Router, RouterRule, shard_experts
from disttrain.kernels.grouped.form import ACTIVATIONS, GatedForm
from disttrain.testing import run_threads
from tests.cases.experts import Experts as OneByOne
from tests.cases.experts import token_by_token

D, H = 6, 4
SHAPES = {2: (), 3: (2,), 4: (2, 1)}
"""By number of dims, what comes before a rank's positions."""


@dataclass(frozen=True)
class Case:
    """Seed; ranks of experts and of hidden dims; positions of each rank's tokens; and how the layer is used."""

    seed: int
    num_ep: int
    num_tp: int
    counts: tuple[int, ...]
    num_dims: int
    exchange: str
    is_masked: bool
    frozen: str
    mode: str
    checkpointed: bool | None


def drawn(seed: int) -> tuple[Case, MixtureOfExperts]:
    pick = random.Random(seed)
    num_ep = pick.choice((1, 2, 3, 4))
    case = Case(
        seed,
        num_ep,
        pick.choice((1, 1, 2)),
        tuple(pick.choice((0, 0, 1, 2, 5, 9)) for _ in range(num_ep)),
        pick.choice((2, 3, 4)),
        pick.choice(("all_to_all", "padded")),
        pick.random() < 0.3,
        pick.choice(("", "", "experts", "router", "x")),
        pick.choice(("train", "train", "train", "eval", "no_grad", "inference")),
        pick.choice((None, None, False, True)),
    )
    return case, mixture(pick, torch.Generator().manual_seed(seed))


def mixture(pick: random.Random, generator: torch.Generator) -> MixtureOfExperts:
    num_experts = pick.choice((1, 2, 3, 5, 8))
    k = pick.choice((1, num_experts, pick.randint(1, num_experts)))
    groups = {"num_groups": 2} if num_experts % 2 == 0 and k <= num_experts // 2 and num_experts > 2 else {}
    score, activation = pick.choice(("softmax", "sigmoid", "softmax_of_chosen")), pick.choice(ACTIVATIONS)
    rule = RouterRule(num_experts, k, score=score, renormalize=pick.random() < 0.5, **groups)
    limit = 1.0 if activation == "clamped" else 0.0
    form = GatedForm(activation, pick.random() < 0.4, pick.random() < 0.4, limit, 1.7)
    has_bias = pick.random() < 0.4
    router = Router(D, rule, bias=has_bias, has_expert_bias=pick.random() < 0.3)
    shared = nn.Linear(D, D) if pick.random() < 0.4 else None
    model = MixtureOfExperts(router, Experts(num_experts, D, H, form, bias=has_bias), shared).double()
    ways = pick.choice(("plain", "plain", "ties", "all to one"))
    with torch.no_grad():
        for value in (*model.parameters(), *([] if router.expert_bias is None else [router.expert_bias])):
            value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64))
        if ways != "plain":
            router.weight.zero_()
        if ways == "all to one":
            router.weight[num_experts // 2] = 3.0
    return model


def judged(model: MixtureOfExperts, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    routing, experts = model.router(x, mask), model.experts
    biases = experts.gate_up_proj_bias, experts.down_proj_bias
    alone = OneByOne(experts.form, [experts.gate_up_proj], experts.down_proj, *biases)
    tokens = x.reshape(-1, D)
    # Without tokens gradients are zeros.
    out = x * 0 + 0 * sum(value.sum() for value in (routing.weights, *experts.parameters()))
    if len(tokens):
        out = token_by_token(tokens, routing.indices, routing.weights, alone).view(x.shape)
    return out if model.shared_experts is None else out + model.shared_experts(x)


def check(case: Case, models: list[MixtureOfExperts]) -> None:
    model = models[disttrain.get_rank()]
    for name in filter(None, (case.frozen.strip("x"),)):
        model.get_submodule(name).requires_grad_(False)
    model.train(case.mode != "eval")
    whole = copy.deepcopy(model)
    mesh = disttrain.init_device_mesh("cpu", (case.num_ep, case.num_tp), mesh_dim_names=("ep", "tp"))
    shard_experts(model, mesh["ep"], tp=mesh["tp"] if case.num_tp > 1 else None, exchange=case.exchange)
    generator = torch.Generator().manual_seed(case.seed)
    before = SHAPES[case.num_dims]
    x = torch.randn(*before, sum(case.counts), D, generator=generator, dtype=torch.float64)
    mask = torch.rand(x.shape[:-1], generator=generator) < 0.7 if case.is_masked else None
    index, dim = mesh["ep"].get_local_rank(), len(before)

    def part(value: torch.Tensor) -> torch.Tensor:
        return value.split(case.counts, dim)[index]

    # Not contiguous, where it has more dims than one.
    own = part(x).transpose(0, -1).contiguous().transpose(0, -1).requires_grad_(case.frozen != "x")
    x.requires_grad_(case.frozen != "x")
    own_mask = None if mask is None else part(mask)
    has_grad = case.mode in ("train", "eval")
    is_recomputed = has_grad and case.checkpointed is not None and own.requires_grad
    modes: dict[str, Any] = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    with modes.get(case.mode, torch.enable_grad)():
        run = checkpoint(model, own, own_mask, use_reentrant=case.checkpointed) if is_recomputed else None
        out = model(own, own_mask) if run is None else run
    expected = judged(whole, x, mask)
    torch.testing.assert_close(out.clone(), part(expected).detach())
    if not has_grad:
        return
    grad = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    (out * part(grad)).sum().backward()
    (expected * grad).sum().backward()
    if x.grad is not None:
        torch.testing.assert_close(own.grad, part(x.grad))
    for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        found, like = parameter.grad, other.grad
        if found is None or like is None:
            assert not any(grad is not None and grad.any() for grad in (found, like))
        elif isinstance(found, DTensor):
            torch.testing.assert_close(found.full_tensor(), like, msg=lambda text, at=name: f"{at}: {text}")
        else:
            disttrain.all_reduce(found, group=mesh["ep"].get_group())
            torch.testing.assert_close(found, like, msg=lambda text, at=name: f"{at}: {text}")


@pytest.mark.parametrize("seed", range(32))
def test_a_random_layer(seed: int) -> None:
    case, model = drawn(seed)
    num_ranks = case.num_ep * case.num_tp
    run_threads(num_ranks, check, case, [copy.deepcopy(model) for _ in range(num_ranks)])
