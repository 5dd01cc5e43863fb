"""What tests of kernels share: both implementations, and the judgement by fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from disttrain.settings import TRITON_INTERPRET

IMPLEMENTATIONS = ["reference", "triton"]
"""Triton's kernels run in its interpreter here, where Triton is and TRITON_INTERPRET=1 was set before it was loaded;
tests/gpu has them on GPUs."""


def use_implementation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "triton":
        if not TRITON_INTERPRET.read():
            pytest.skip("Triton's interpreter is not asked for: TRITON_INTERPRET=1")
        pytest.importorskip("triton.language")
    monkeypatch.setenv("DISTTRAIN_KERNELS", name)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def values_and_grads(run: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results, and the gradients of all inputs from a sum in which each element has a weight of its own."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    results = run(*leaves)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    total = sum(
        (result * drawn(*result.shape, seed=77 + i, dtype=result.dtype).to(result.device)).sum()
        for i, result in enumerate(results)
    )
    grads = torch.autograd.grad(total, leaves)
    return [result.detach() for result in results] + list(grads)


def judge(
    run: Callable[..., Any], expected: Callable[..., Any], inputs: Sequence[torch.Tensor], dtype: torch.dtype
) -> None:
    """`run` of inputs of `dtype` is as `expected` of the same numbers in fp64, but for what rounding explains."""
    rounded = [tensor.to(dtype) for tensor in inputs]
    found = values_and_grads(run, rounded)
    wished = values_and_grads(expected, [tensor.double() for tensor in rounded])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for one, other in zip(found, wished, strict=True):
        assert one.dtype == dtype
        scale = max(1.0, other.abs().max().item()) if other.numel() else 1.0
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance * scale)
