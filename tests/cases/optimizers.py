"""Parameters of several shapes, one without elements, and gradients for each step of an optimizer."""

from __future__ import annotations

import torch
from torch import nn

from tests.cases.kernels import drawn

SHAPES = [(3, 5), (2049,), (1,), (0, 4), (64, 64)]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(drawn(*shape, seed=seed, dtype=dtype)) for seed, shape in enumerate(SHAPES)]


def give_gradients(own: list[nn.Parameter], step: int, factor: float = 1.0) -> None:
    for place, parameter in enumerate(own):
        parameter.grad = drawn(*parameter.shape, seed=100 * step + place, dtype=parameter.dtype) * factor
