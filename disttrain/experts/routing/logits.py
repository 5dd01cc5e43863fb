"""The router's product, in a wider dtype than the tokens', of which backward keeps no wider copy."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from disttrain.autocast import is_within_autocast
from disttrain.kernels.operators import call, define, differentiate, refuse_second_derivative


def logits_of(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None
) -> torch.Tensor:
    """Returns (tokens, experts) in `dtype`, or in that of x if this is wider, or `dtype` None; whatever autocast says.

    Args: x  (tokens, hidden_size);  weight  (experts, hidden_size);  bias  (experts,).
    """
    dtype = torch.promote_types(dtype or x.dtype, x.dtype)
    with _without_autocast(x):
        if x.dtype == dtype:
            return _product(x, weight, bias, dtype)
        result: torch.Tensor = call(_wide_linear, x, weight, bias, dtype)
        return result


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty(len(x), len(weight), dtype=dtype)


def _product_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The wider copy of the tokens, as large as they are, lives no longer than this.
    return (grad @ weight.to(grad.dtype)).to(x.dtype), (grad.T @ x.to(grad.dtype)).to(weight.dtype)


_wide_linear = define(
    "router_linear(Tensor x, Tensor weight, Tensor? bias, ScalarType dtype) -> Tensor", _product, _shape
)
_wide_linear_backward = define(
    "router_linear_backward(Tensor grad, Tensor x, Tensor weight) -> (Tensor, Tensor)",
    _product_backward,
    lambda grad, x, weight: (torch.empty_like(x), torch.empty_like(weight)),
)
refuse_second_derivative(_wide_linear_backward)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    with _without_autocast(x):
        grads = _wide_linear_backward(grad, x, weight)
    return *grads, None if ctx.bias_dtype is None else grad.sum(0).to(ctx.bias_dtype), None


differentiate(_wide_linear, _keep, _backward)


def _without_autocast(x: torch.Tensor) -> AbstractContextManager[object]:
    return torch.autocast(x.device.type, enabled=False) if is_within_autocast(x.device) else nullcontext()
