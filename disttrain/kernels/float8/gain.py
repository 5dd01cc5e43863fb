"""Measures whether a linear layer is faster in float8: once for each size, forward and both gradients.

Casts take time that grows with the tokens and one size of the layer, products what grows with both sizes: small layers
lose. The time is the GPU's alone, without gaps in which it waits for the host, since a compiled block has few and a
captured step has none. What the host launches more of must not take longer than the GPU either.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F

from disttrain.kernels._torch import keep_busy
from disttrain.kernels.agreement import agreed
from disttrain.kernels.float8.linear import Recipe, float8_linear

_LEAST_GAIN: Final = 1.05

_HOST_S: Final = 80e-6
"""The host's time for a layer's additional launches, about ten, in a compiled block."""

_NUM_WARMUPS: Final = 2
_NUM_ROUNDS: Final = 5
_AHEAD_S: Final = 5e-3
"""The GPU is kept busy so long while the host launches."""


class Gain(NamedTuple):
    """Seconds of a layer of these sizes, forward and backward, and of the host to launch it eagerly in float8."""

    out_features: int
    in_features: int
    num_tokens: int
    bf16_s: float
    float8_s: float
    host_s: float

    @property
    def pays(self) -> bool:
        """True where a layer in float8 makes a step faster."""
        return self.bf16_s >= _LEAST_GAIN * self.float8_s and self.float8_s >= _HOST_S

    def __str__(self) -> str:
        sizes = f"{self.num_tokens} x {self.in_features} to {self.out_features}"
        return f"{sizes} take {1e3 * self.bf16_s:.3f} ms in bf16, {1e3 * self.float8_s:.3f} ms in float8"


def pays(gain: Gain, recipe: str) -> bool:
    """True where a layer is to be in float8; alike on all ranks."""
    subject = f"float8/{recipe} {gain.num_tokens} x {gain.in_features} x {gain.out_features}"
    return agreed(subject, str(gain.pays)) == str(True)


@cache
def measured(
    out_features: int, in_features: int, has_bias: bool, num_tokens: int, recipe: Recipe, device: torch.device
) -> Gain:
    """The median times of several rounds, in turn. Random numbers of the program stay what they are."""

    def run() -> Gain:
        with torch.cuda.device(device), torch.enable_grad():
            generator = torch.Generator(device).manual_seed(0)

            def drawn(*shape: int) -> Any:
                return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device)

            leaves = [drawn(num_tokens, in_features), drawn(out_features, in_features)]
            leaves += [drawn(out_features)] * has_bias
            leaves = [leaf.requires_grad_() for leaf in leaves]
            grad = drawn(num_tokens, out_features)
            # autograd's own thread warns where its first call is a product: it has not looked for the GPU before.
            torch.zeros(1, device=device, requires_grad=True).exp().backward()
            ways: list[Callable[..., Any]] = [F.linear, partial(float8_linear, recipe=recipe)]
            rounds = [[_seconds(way, leaves, grad) for way in ways] for _ in range(_NUM_WARMUPS + _NUM_ROUNDS)]
            (bf16_s, _), (float8_s, host_s) = (
                (statistics.median(gpu for gpu, _ in times), statistics.median(host for _, host in times))
                for times in zip(*rounds[_NUM_WARMUPS:], strict=True)
            )
        return Gain(out_features, in_features, num_tokens, bf16_s, float8_s, host_s)

    # The caller's modes, such as a default device, are those of its thread.
    with ThreadPoolExecutor(1, "disttrain-float8") as thread:
        return thread.submit(run).result()


def _seconds(way: Callable[..., Any], leaves: list[torch.Tensor], grad: torch.Tensor) -> tuple[float, float]:
    """The GPU's time for one step, and the host's."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    keep_busy(_AHEAD_S)
    begun_s = time.perf_counter()
    begun.record()
    torch.autograd.grad(way(*leaves), leaves, grad)
    ended.record()
    host_s = time.perf_counter() - begun_s
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3, host_s
