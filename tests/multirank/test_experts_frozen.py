"""Ranks of which one trains less than others: all come to the exchanges of backward, and what is trained is right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.experts import Experts, combine, dispatch, shard_experts, use_experts
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.expert_blocks import BLOCKS, D
from tests.cases.expert_layers import HIDDEN, INTER, tokens
from tests.cases.expert_mixtures import ep_mesh

TRAINED = {
    "one nothing": ("xwe", ""),
    "one nothing, others experts": ("e", ""),
    "one nothing, others weights": ("w", ""),
    "one weights, others tokens": ("x", "w"),
    "one experts, others tokens": ("xw", "e"),
    "one weights, others experts": ("e", "w"),
    "one tokens": ("", "x"),
    "one experts": ("", "e"),
    "nobody anything": ("", ""),
}
"""What has gradients on all ranks but the middle one, and there: tokens `x`, weights `w`, experts `e`."""


def drawn(module: nn.Module) -> nn.Module:
    """The module with the same values everywhere; ranks may be threads, which share torch's generator."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)
    return module.double()


def check(trained: tuple[str, str], is_checkpointed: bool) -> None:
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    alone = drawn(Experts(5, HIDDEN, INTER))
    layer = shard_experts(copy.deepcopy(alone), ep_mesh())
    mine = trained[rank == 1]
    layer.requires_grad_("e" in mine)
    parts = [tokens(each, 4 + each, 2, 5) for each in range(size)]
    own_x, own_indices, own_weights = parts[rank]
    x, indices, weights = (torch.cat(each) for each in zip(*parts, strict=True))
    for each in (x, weights):
        each.requires_grad_()
    alone(x, indices, weights).square().sum().backward()
    own_x.requires_grad_("x" in mine)
    own_weights.requires_grad_("w" in mine)
    if is_checkpointed:
        out = checkpoint(layer, own_x, own_indices, own_weights, use_reentrant=False)
    else:
        out = layer(own_x, own_indices, own_weights)
    if any(trained):
        out.square().sum().backward()
    assert out.requires_grad or not any(trained)
    for own, whole, name in ((own_x, x, "x"), (own_weights, weights, "w")):
        if name in mine:
            torch.testing.assert_close(own.grad, whole.grad.split([len(part[0]) for part in parts])[rank])
        else:
            assert own.grad is None
    for found, whole in zip(layer.parameters(), alone.parameters(), strict=True):
        if "e" in mine:
            expected = whole.grad.chunk(size)[rank]
            torch.testing.assert_close(found.grad.to_local(), expected)
        else:
            assert found.grad is None


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("name", list(TRAINED))
def test_a_rank_that_trains_less_keeps_no_other_waiting(name: str, is_checkpointed: bool) -> None:
    run_threads(3, check, TRAINED[name], is_checkpointed)


@on_ranks(2)
def test_so_over_gloo() -> None:
    check(TRAINED["one nothing"], True)
    check(TRAINED["one experts, others tokens"], False)


def check_list() -> None:
    rank = disttrain.get_rank()
    alone = drawn(BLOCKS["list_with_forward"]())
    model = copy.deepcopy(alone)
    use_experts(model, report=lambda _: None)
    shard_experts(model, ep_mesh())
    if rank == 1:
        model.requires_grad_(False)
    x = torch.randn(3, 4, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alone(x).sum().backward()
    model(x[rank][None]).sum().backward()
    expected = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        if rank == 1:
            assert parameter.grad is None
        elif "experts" in name:
            like = expected[name].grad
            torch.testing.assert_close(parameter.grad, torch.zeros_like(parameter) if like is None else like)


def test_a_rank_with_a_frozen_list() -> None:
    run_threads(3, check_list)


def check_dispatch() -> None:
    """Rows are sent by the functions alone: one rank's tokens have no gradient."""
    rank = disttrain.get_rank()
    x, indices, weights = tokens(rank, 4, 2, 5)
    x.requires_grad_(rank != 1)
    sent = dispatch(x, indices, 5, ep_mesh(), weights=weights)
    combine(sent.rows * 3, sent, weights).sum().backward()
    if rank != 1:
        torch.testing.assert_close(x.grad, (3 * weights.sum(1, keepdim=True)).expand_as(x))


def test_rows_that_are_sent_by_functions() -> None:
    run_threads(3, check_dispatch)
