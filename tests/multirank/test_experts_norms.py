"""The norm of gradients where experts are modules of their own, which each rank has some of."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import disttrain
from disttrain import kernels
from disttrain.errors import DisttrainError
from disttrain.experts import clip_grad_norm_, shard_experts, use_experts
from disttrain.testing import run_threads
from tests.cases.expert_blocks import BLOCKS


def with_gradients(num_ranks: int) -> tuple[nn.Module, nn.Module]:
    """A block divided among ranks, and the same alone; some experts have no gradient, and some ranks no expert."""
    alone: nn.Module = BLOCKS["list_with_forward"]().double()
    generator = torch.Generator().manual_seed(0)  # ranks are threads, which share torch's own
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model = copy.deepcopy(alone)
    use_experts(model, report=lambda _: None)
    mesh = disttrain.init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("ep",))
    shard_experts(model, mesh["ep"])
    for module in (alone, model):
        for name, parameter in module.named_parameters():
            parameter.grad = None if ".0." in name else parameter.detach().sin() * 3
    return model, alone


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_the_norm_is_of_all_ranks_experts(num_ranks: int, norm_type: float) -> None:
    def on_rank() -> None:
        model, alone = with_gradients(num_ranks)
        expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.5, norm_type)
        torch.testing.assert_close(clip_grad_norm_(model, 0.5, norm_type), expected)
        wholes = dict(alone.named_parameters())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, wholes[name].grad)

    run_threads(num_ranks, on_rank)


def test_what_is_not_finite_is_said_on_all_ranks() -> None:
    def on_rank() -> None:
        model, _ = with_gradients(2)
        if disttrain.get_rank() == 1:
            last = [parameter for name, parameter in model.named_parameters() if "experts" in name][-1]
            assert last.grad is not None
            last.grad.fill_(math.nan)
        with pytest.raises(DisttrainError, match="nan"):
            clip_grad_norm_(model, 1.0, error_if_nonfinite=True)

    run_threads(2, on_rank)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_an_optimizers_max_norm_refuses_them(num_ranks: int) -> None:
    def on_rank() -> None:
        model, _ = with_gradients(num_ranks)
        with pytest.raises(DisttrainError, match=r"experts.clip_grad_norm_"):
            kernels.AdamW(model.parameters(), max_norm=1.0).step()

    run_threads(num_ranks, on_rank)
