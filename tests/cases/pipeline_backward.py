"""A backward in two parts beside one that is not divided."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from disttrain.pipelining import Backward, split_layers

DIM = 8


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def both_ways(module: nn.Module, *makes: Callable[[], torch.Tensor], num_layers: int | None = None) -> nn.Module:
    """Three microbatches at once and in two parts: all equal, and nothing but inputs gets a gradient before W.

    Returns: the module whose backward was split.
    """
    plain, split = module, copy.deepcopy(module)
    found = split_layers(split)
    assert num_layers is None or found == num_layers
    for _ in range(3):
        inputs = [make() for make in makes]
        copies = [given.detach().requires_grad_(given.requires_grad) for given in inputs]
        expected = as_list(plain(*inputs))
        backward = Backward()
        with backward.forward():
            outputs = as_list(split(*copies))
        grads = [torch.randn_like(output) for output in expected]
        torch.autograd.backward(expected, grads)
        before = [None if p.grad is None else p.grad.clone() for p in split.parameters()]
        of_inputs = backward.backward_input(outputs, grads, copies)
        assert_equal([p.grad for p in split.parameters()], before)
        assert_equal(outputs, expected)
        assert_equal(of_inputs, [given.grad for given in inputs])
        backward.backward_weight()
        assert_equal([p.grad for p in split.parameters()], [p.grad for p in plain.parameters()])
    return split


def as_list(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def assert_equal(found: Any, expected: Any) -> None:
    assert len(list(found)) == len(list(expected))
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
