"""Small copies of modules in fp64 with random weights, on which two ways to compute are compared."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, Final

import torch
from torch import nn

from disttrain.experts.models._torch import copied

_SMALL: Final = 1 << 20
"""Elements of a module that is copied at its own size."""
WIDE: Final = 1e-11
"""The error that rounding makes in results in fp64, relative to the greatest value."""
NARROW: Final = 1e-6
"""In fp32."""
_SEEDED: Final = Lock()
"""Held while torch's generator, which all threads share, is seeded for one of them."""

Results = tuple[list[torch.Tensor], list[torch.Tensor]]


class Replica:
    """A copy of a module for trials: of the same class and plain attributes, with other weights, in fp64 on the CPU.

    Two dims become small where the module is large, and attributes of the same value with them. Nothing of the module
    is read but shapes and values of buffers, so it may be on the meta device, or sharded.

    Args: width, hidden  the dims that may become small;  kept  a size that stays, whatever else has it.
    """

    def __init__(self, module: nn.Module, width: int, hidden: int, kept: int) -> None:
        total = sum(parameter.numel() for parameter in module.parameters())
        self._sizes = {} if total <= _SMALL else _smaller(width, hidden, kept)
        self._generator = torch.Generator().manual_seed(0)
        self.width = self._sizes.get(width, width)
        self.module = copied(module, self._attribute, self._parameter, _buffer)

    def drawn(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normal values, from a generator of its own."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float64) * scale

    def chosen(self, tokens: int, k: int, num_experts: int) -> torch.Tensor:
        """(tokens, k): different experts for each token."""
        scores = torch.rand(tokens, num_experts, generator=self._generator)
        return scores.topk(k, dim=-1).indices

    def _attribute(self, value: Any) -> Any:
        if type(value) is int:
            return self._sizes.get(value, value)
        if hasattr(value, "_experts_implementation"):
            value = copy.copy(value)
            # All of transformers' mean the same; this one computes anywhere, in any dtype.
            value._experts_implementation = "eager"
        return value

    def _parameter(self, value: torch.Tensor) -> nn.Parameter:
        shape = [self._size(size) for size in value.shape]
        # Large enough for the clamps of activations to act.
        scale = 2.0 / max(shape[-1] if len(shape) > 1 else 1, 1) ** 0.5
        return nn.Parameter(self.drawn(*shape, scale=scale), value.requires_grad)

    def _size(self, size: int) -> int:
        if size in self._sizes:
            return self._sizes[size]
        for big, small in self._sizes.items():
            if size % big == 0 and size // big <= 1024:
                return size // big * small
        return size


def _smaller(width: int, hidden: int, kept: int) -> dict[int, int]:
    sizes = {}
    if hidden != kept:
        sizes[hidden] = 24 if hidden == 2 * width else 8
    if width != kept:
        sizes[width] = 8 if width == hidden else 16 if width == 2 * hidden else 12
    if 2 * hidden not in (kept, width):
        sizes[2 * hidden] = 2 * sizes.get(hidden, hidden)
    return sizes


def _buffer(value: torch.Tensor) -> torch.Tensor:
    if value.device.type == "meta":
        return torch.zeros(value.shape, dtype=torch.float64 if value.is_floating_point() else value.dtype)
    value = value.detach().cpu()
    return value.double() if value.is_floating_point() else value.clone()


def results(
    module: nn.Module, forward: Callable[..., Any], inputs: Sequence[torch.Tensor], *, with_grads: bool = True
) -> Results:
    """The tensors that a forward gives, and their gradients in the module's parameters and in the inputs."""
    leaves = [value.clone().requires_grad_(with_grads and value.is_floating_point()) for value in inputs]
    with _SEEDED, torch.set_grad_enabled(with_grads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Some forwards write to what they are given, which a leaf forbids.
        out = forward(module, *[value * 1 if value.is_floating_point() else value for value in leaves])
    tensors = [value for value in (out if isinstance(out, tuple) else (out,)) if isinstance(value, torch.Tensor)]
    generator = torch.Generator().manual_seed(1)
    losses = [
        (value * torch.randn(value.shape, generator=generator, dtype=torch.float64)).sum()
        for value in tensors
        if value.requires_grad
    ]
    targets = [each for each in (*module.parameters(), *leaves) if each.requires_grad]
    if len(losses) == 0:
        return tensors, []
    grads: Sequence[torch.Tensor | None] = torch.autograd.grad(sum(losses, torch.zeros(())), targets, allow_unused=True)
    return tensors, [
        torch.zeros_like(target) if grad is None else grad for grad, target in zip(grads, targets, strict=True)
    ]


def difference_of(first: Results, second: Results) -> float:
    """The greatest difference of two results, relative to a tensor's greatest value; inf where they are not alike."""
    ones, twos = [*first[0], *first[1]], [*second[0], *second[1]]
    if len(first[0]) != len(second[0]) or len(ones) != len(twos):
        return math.inf
    if any(left.shape != right.shape or left.dtype != right.dtype for left, right in zip(ones, twos, strict=True)):
        return math.inf
    return max(
        (_difference(left.double(), right.double()) for left, right in zip(ones, twos, strict=True)), default=math.inf
    )


def _difference(first: torch.Tensor, second: torch.Tensor) -> float:
    difference, size = ((first - second).abs().max().item(), first.abs().max().item()) if first.numel() else (0.0, 0.0)
    if math.isfinite(difference) and math.isfinite(size):
        return 0.0 if difference == 0 else difference / size if size else math.inf
    return math.inf
