"""Blocks that were written elsewhere, divided among ranks: the values of one process, and saves for any number."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import disttrain
from disttrain.experts import shard_experts, use_experts
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.expert_blocks import BLOCKS, D


def block(name: str) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model: nn.Module = BLOCKS[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return model


def divided(model: nn.Module, num_ranks: int, exchange: str = "auto") -> nn.Module:
    use_experts(model, report=lambda _: None)
    mesh = disttrain.init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("ep",))
    return shard_experts(model, mesh["ep"], exchange=exchange)


def check(name: str, counts: Sequence[int], exchange: str = "auto") -> None:
    """Outputs and gradients on this rank, which has so many tokens."""
    rank = disttrain.get_rank()
    alone = block(name).eval()
    model = divided(copy.deepcopy(alone), len(counts), exchange)
    x = torch.randn(sum(counts), D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    shape = (-1, D) if name in ("late_softmax", "biases") else (1, -1, D)
    grad = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    outs, grads = [], []
    for module, part in ((alone, slice(None)), (model, own)):
        given = x[part].reshape(shape).clone().requires_grad_()
        out = module(given * 1)
        out = out[0] if isinstance(out, tuple) else out
        (out * grad[part].view(out.shape)).sum().backward()
        outs.append(out.reshape(-1, D))
        grads.append(given.grad.view(-1, D))
    torch.testing.assert_close(outs[1], outs[0][own])
    torch.testing.assert_close(grads[1], grads[0][own])
    expected = dict(alone.named_parameters())
    for key, parameter in model.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if hasattr(found, "full_tensor"):
            found = found.full_tensor()
        elif ".experts." not in f".{key}" and "mlp_experts" not in key:
            found = found.clone()
            disttrain.all_reduce(found)
        like = expected[key].grad
        torch.testing.assert_close(found, torch.zeros_like(found) if like is None else like)


@pytest.mark.parametrize("counts", [[5, 3], [4, 0, 6], [3, 2, 1, 4]], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_values_are_those_of_one_process(name: str, counts: list[int]) -> None:
    run_threads(len(counts), check, name, counts)
    if name == "sorted_rows":
        run_threads(1, check, name, counts[:1])


@on_ranks(3)
def test_values_over_gloo() -> None:
    check("shared", [4, 0, 6], "padded")
    check("list_with_forward", [2, 5, 1])
    check("sorted_rows", [2, 5, 1])
