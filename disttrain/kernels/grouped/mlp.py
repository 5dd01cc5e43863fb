"""Forward and backward of all experts' gated layers, as functions of plain tensors.

Weights scale what goes into the down product, not what comes out: so the gradient of weights needs no results of
forward. Forward keeps its inputs and gate and up; backward takes the rows of tokens once more, and computes
activation(gate) * up again. Source: Guo et al., "SonicMoE" (arXiv 2512.14080), for the former.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from disttrain.kernels.grouped.choice import kernels_of, outer
from disttrain.kernels.grouped.float8 import product_by
from disttrain.kernels.grouped.form import GatedForm
from disttrain.kernels.grouped.table import Kernels


class ExpertWeights(NamedTuple):
    """Weights of experts, as `products.expert_mlp` takes them; `up` is None where `gate` holds both."""

    gate: torch.Tensor
    up: torch.Tensor | None
    down: torch.Tensor
    gate_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


class Tokens(NamedTuple):
    """The way of tokens to experts: order, slots and ends of `ExpertOrder`; weights (tokens, k)."""

    order: torch.Tensor
    slots: torch.Tensor
    ends: torch.Tensor
    weights: torch.Tensor


class Grads(NamedTuple):
    """Gradients of an input, of weights (tokens, k) and of experts' weights; None for what nobody has or wants."""

    x: torch.Tensor | None
    weights: torch.Tensor | None
    gate: torch.Tensor | None
    up: torch.Tensor | None
    down: torch.Tensor | None
    gate_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def forward(
    x: torch.Tensor,
    ends: torch.Tensor,
    tokens: Tokens | None,
    experts: ExpertWeights,
    form: GatedForm,
    recipe: str,
    *,
    is_cleared: bool = True,
    kernels: Kernels | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Computes results, and the products with gate and up, which backward wants.

    Args: x       (rows, D), sorted by expert, or (tokens, D) where there are `tokens`.
          recipe  of float8, empty for none.
          is_cleared  rows past the last end become zeros; else nobody may read them.
          kernels  those of x, where they are known.
    """
    kernels, product = kernels or kernels_of(x), product_by(recipe)
    order, slots, weights, k = _unpacked(tokens)
    rows = x if order is None else kernels.take(x, order, ends, k, None)
    gate = product(rows, experts.gate, ends, form.is_transposed, kernels)
    up = None if experts.up is None else product(rows, experts.up, ends, form.is_transposed, kernels)
    if experts.gate_bias is not None:
        kernels.add_bias(gate, experts.gate_bias, ends, None, None)
    hidden = kernels.gated(*_halves(gate, up, form), ends, form, order, weights)
    result = product(hidden, experts.down, ends, form.is_transposed, kernels)
    if experts.down_bias is not None:
        kernels.add_bias(result, experts.down_bias, ends, order, weights)
    if slots is None:
        return kernels.clear_past(result, ends) if is_cleared else result, gate, up
    return kernels.combine(result, slots, ends, k, None), gate, up


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    ends: torch.Tensor,
    tokens: Tokens | None,
    experts: ExpertWeights,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    form: GatedForm,
    recipe: str,
    wants_x: bool = True,
    wants_experts: bool = True,
    *,
    is_cleared: bool = True,
    kernels: Kernels | None = None,
) -> Grads:
    """Computes gradients of what `forward` took, which returned `gate` and `up`."""
    kernels = kernels or kernels_of(x)
    order, slots, weights, k = _unpacked(tokens)
    if order is not None:
        grad = kernels.take(grad, order, ends, k, None)
    of_down_bias = of_weights = None
    if experts.down_bias is not None:
        of_down_bias, of_weights = kernels.bias_grad(grad, experts.down_bias, ends, order, weights)
    product = product_by(recipe)
    of_hidden = product(grad, experts.down, ends, not form.is_transposed, kernels)
    of_gate, of_up = torch.empty_like(gate), None if up is None else torch.empty_like(up)
    hidden, of_scales = kernels.gated_backward(
        of_hidden, *_halves(gate, up, form), ends, form, order, weights, *_halves(of_gate, of_up, form)
    )
    if of_scales is not None and of_weights is not None:
        of_scales += of_weights
    of_first = of_second = of_down = of_gate_bias = None
    if wants_experts:
        of_down = _outer(grad, hidden, ends, form, kernels)
        del of_hidden, hidden, grad
        rows = x if order is None else kernels.take(x, order, ends, k, None)
        of_first = _outer(of_gate, rows, ends, form, kernels)
        of_second = None if of_up is None else _outer(of_up, rows, ends, form, kernels)
        del rows
        if experts.gate_bias is not None:
            of_gate_bias = kernels.bias_grad(of_gate, experts.gate_bias, ends, None, None)[0]
    of_x = None
    if wants_x:
        # Nothing is written past the last end.
        of_x = product(of_gate, experts.gate, ends, not form.is_transposed, kernels)
        if experts.up is not None and of_up is not None:
            of_x += product(of_up, experts.up, ends, not form.is_transposed, kernels)
        if slots is not None:
            of_x = kernels.combine(of_x, slots, ends, k, None)
        elif is_cleared:
            of_x = kernels.clear_past(of_x, ends)
    if weights is not None and of_scales is not None:
        of_scales = of_scales.view(weights.shape).to(weights.dtype)
    return Grads(of_x, of_scales, of_first, of_second, of_down, of_gate_bias, of_down_bias)


def _unpacked(
    tokens: Tokens | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, int]:
    """Order, slots and weights, and the number of each token's experts."""
    if tokens is None:
        return None, None, None, 0
    return tokens.order, tokens.slots, tokens.weights, tokens.weights.shape[1]


def _halves(gate: torch.Tensor, up: torch.Tensor | None, form: GatedForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up, (rows, H) each with equal strides."""
    if up is not None:
        return gate, up
    if form.is_interleaved:
        return gate[:, ::2], gate[:, 1::2]
    return gate.chunk(2, 1)  # type: ignore[return-value]  # its stub tells no number


def _outer(
    of_result: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, form: GatedForm, kernels: Kernels
) -> torch.Tensor:
    """The gradient of weights that made results of rows."""
    left, right = (rows, of_result) if form.is_transposed else (of_result, rows)
    return outer(left, right, ends, kernels)
