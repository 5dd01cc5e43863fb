"""Kernels within transforms of torch.func: the values of torch's own operators, or one sentence that says no."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, jacrev, vmap

from disttrain.experts import use_experts
from disttrain.kernels import float8_linear, layer_norm, linear_cross_entropy, rms_norm, rotate, rotate_, swiglu
from tests.cases.expert_blocks import BLOCKS, D
from tests.cases.kernels import drawn

Function = Callable[..., torch.Tensor]
X, WEIGHT, BIAS = drawn(3, 4, 8), drawn(8, seed=1), drawn(8, seed=2)
ANGLES = drawn(4, 4, seed=3)


def rotated(rotating: Any) -> Function:
    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        turned: torch.Tensor = rotating((x * weight + bias)[None, None], ANGLES.cos(), ANGLES.sin())
        return turned.view(x.shape)

    return run


def rotated_by_torch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


PAIRS: dict[str, tuple[Function, Function]] = {
    "rms_norm": (lambda x, w, b: rms_norm(x, w) + b, lambda x, w, b: F.rms_norm(x, (8,), w) + b),
    "layer_norm": (layer_norm, lambda x, w, b: F.layer_norm(x, (8,), w, b)),
    "residual": (
        lambda x, w, b: layer_norm(x, w, b, residual=2 * x)[0],
        lambda x, w, b: F.layer_norm(3 * x, (8,), w, b),
    ),
    "swiglu": (lambda x, w, b: swiglu(x * w, x + b), lambda x, w, b: F.silu(x * w) * (x + b)),
    "rotate": (rotated(rotate), rotated(rotated_by_torch)),
    "rotate_": (rotated(rotate_), rotated(rotated_by_torch)),
}


def squared(function: Function) -> Function:
    return lambda *given: function(*given).square().sum()


def of_batches(function: Function) -> Function:
    return squared(vmap(function, (0, None, None)))


@pytest.mark.parametrize("name", PAIRS)
def test_values_are_those_of_torch(name: str) -> None:
    for transformed in (
        lambda run: vmap(run, (0, None, None))(X, WEIGHT, BIAS),
        lambda run: vmap(grad(squared(run), (0, 1, 2)), (0, None, None))(X, WEIGHT, BIAS),  # of each sample
        lambda run: grad(of_batches(run), (0, 1, 2))(X, WEIGHT, BIAS),
        lambda run: jacrev(run)(X[0], WEIGHT, BIAS),
    ):
        ours, theirs = (transformed(run) for run in PAIRS[name])
        torch.testing.assert_close(ours, theirs)


def test_second_derivatives() -> None:
    def curvature(run: Function) -> torch.Tensor:
        inner = grad(squared(run))
        result: torch.Tensor = grad(lambda x: inner(x, WEIGHT, BIAS).square().sum())(X[0])
        return result

    torch.testing.assert_close(curvature(PAIRS["rotate"][0]), curvature(PAIRS["rotate"][1]))
    with pytest.raises(NotImplementedError, match="disttrain::norm is not differentiable"):
        curvature(layer_norm)


def test_what_does_not_go_through_says_so() -> None:
    hidden, weight, target = drawn(6, 16), drawn(32, 16, seed=1), torch.arange(6)
    with pytest.raises(
        NotImplementedError, match=r"linear_cross_entropy does not go through transforms of torch\.func"
    ):
        grad(lambda x: linear_cross_entropy(x, weight, target))(hidden)
    with pytest.raises(NotImplementedError, match=r"float8_linear does not go through transforms"):
        vmap(lambda x: float8_linear(x, weight.float()))(hidden.float())


@pytest.mark.parametrize("name", ["list_with_forward", "shared", "sorted_rows"])
def test_adopted_experts(name: str) -> None:
    torch.manual_seed(0)
    block = BLOCKS[name]().double().eval()
    x = drawn(1, 6, D)

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        out = functional_call(block, parameters, (x,))
        return (out[0] if isinstance(out, tuple) else out).square().sum()

    values = {name: value.detach() for name, value in block.named_parameters()}
    expected = grad(loss)(values)
    assert use_experts(block, report=lambda _: None).taken
    torch.testing.assert_close(grad(loss)(values), expected)
