"""use_experts on models that were not written for it: what it takes, what it leaves, and the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from disttrain.experts import use_experts
from tests.cases.expert_blocks import BLOCKS, D
from tests.cases.expert_models import CONFIGS, made


def quietly(model: nn.Module) -> Any:
    return use_experts(model, report=lambda _: None)


def assert_same(model: nn.Module, other: nn.Module, x: torch.Tensor) -> None:
    """Outputs, and gradients of x and of all parameters."""
    outs, grads = [], []
    for each in (model, other):
        given = x.clone().requires_grad_()
        torch.manual_seed(0)
        out = each(given * 1)
        tensors = out if isinstance(out, tuple) else (out,)
        sum(
            (one * torch.linspace(-1, 1, one.numel(), dtype=one.dtype).view(one.shape)).sum() for one in tensors
        ).backward()
        outs.append(tensors)
        grads.append([given.grad, *(parameter.grad for parameter in each.parameters())])
    torch.testing.assert_close(*outs)
    names = ["x", *(name for name, _ in model.named_parameters())]
    for name, one, two in zip(names, *grads, strict=True):
        expected = torch.zeros_like(two) if one is None else one
        torch.testing.assert_close(two, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_as_people_write_them(name: str) -> None:
    torch.manual_seed(0)
    model = BLOCKS[name]().double()
    other = copy.deepcopy(model)
    state = torch.get_rng_state()
    result = quietly(other)
    assert torch.equal(state, torch.get_rng_state())
    assert result.taken
    assert not result.left
    assert isinstance(other, type(model))
    assert list(model.state_dict()) == list(other.state_dict())
    x = torch.randn(14, D).double() if name in ("late_softmax", "biases") else torch.randn(2, 7, D).double()
    for is_training in (True, False):
        assert_same(model.train(is_training), other.train(is_training), x)
        model.zero_grad()
        other.zero_grad()
    assert not quietly(other).taken


@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_transformers(name: str) -> None:
    model = made(name)
    other = copy.deepcopy(model)
    result = quietly(other)
    assert result.taken
    assert not result.left
    assert list(model.state_dict()) == list(other.state_dict())
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(1))
    outs = []
    for each in (model, other):
        torch.manual_seed(0)
        out = each(tokens, labels=tokens)
        out.loss.backward()
        outs.append(out.logits)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-6, atol=1e-9)
    for (path, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        if one.grad is None:
            assert two.grad is None or not two.grad.any(), path
        else:
            torch.testing.assert_close(
                two.grad, one.grad, rtol=1e-6, atol=1e-9, msg=lambda text, path=path: f"{path}: {text}"
            )
