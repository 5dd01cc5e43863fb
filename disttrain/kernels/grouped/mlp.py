"""Forward and backward of all experts' gated layers, as functions of plain tensors.

Weights scale what goes into the down product, not what comes out: so the gradient of weights needs no results of
forward. Forward keeps its inputs and gate and up; backward takes the rows of tokens once more, and computes
activation(gate) * up again. Source: Guo et al., "SonicMoE" (arXiv 2512.14080), for the former.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from disttrain.kernels.grouped.choice import products_of, rows_of
from disttrain.kernels.grouped.float8 import outer, product
from disttrain.kernels.grouped.form import GatedForm


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of experts, as `products.expert_mlp` takes them; `up` is None where `gate` holds both."""

    gate: torch.Tensor
    up: torch.Tensor | None
    down: torch.Tensor
    gate_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


@dataclass(frozen=True)
class Tokens:
    """Which tokens go to which experts: order, slots and ends of `ExpertOrder`; weights (tokens, k)."""

    order: torch.Tensor
    slots: torch.Tensor
    ends: torch.Tensor
    weights: torch.Tensor

    @property
    def k(self) -> int:
        return self.weights.shape[1]


@dataclass(frozen=True)
class Grads:
    """Gradients of an input, of weights (tokens, k) and of experts' weights."""

    x: torch.Tensor
    weights: torch.Tensor | None
    gate: torch.Tensor
    up: torch.Tensor | None
    down: torch.Tensor
    gate_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def forward(
    x: torch.Tensor, ends: torch.Tensor, tokens: Tokens | None, experts: ExpertWeights, form: GatedForm, recipe: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Computes results, and the products with gate and up, which backward wants.

    Args: x       (rows, D), sorted by expert, or (tokens, D) where there are `tokens`.
          recipe  of float8, empty for none.
    """
    rows = x if tokens is None else rows_of(x).take(x, tokens.order, ends, tokens.k, None)
    kernels = products_of(rows)
    gate = product(rows, experts.gate, ends, form.is_transposed, recipe)
    up = None if experts.up is None else product(rows, experts.up, ends, form.is_transposed, recipe)
    if experts.gate_bias is not None:
        kernels.add_bias(gate, experts.gate_bias, ends, None)
    scales = None if tokens is None else _scales(tokens)
    hidden = kernels.gated(*_halves(gate, up, form), ends, form, scales)
    result = product(hidden, experts.down, ends, form.is_transposed, recipe)
    if experts.down_bias is not None:
        kernels.add_bias(result, experts.down_bias, ends, scales)
    if tokens is None:
        return rows_of(x).clear_past(result, ends), gate, up
    return rows_of(x).combine(result, tokens.slots, ends, tokens.k, None), gate, up


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
) -> Grads:
    """Computes gradients of all that `forward` took, which returned `gate` and `up`."""
    row_kernels, kernels = rows_of(x), products_of(x)
    scales = None if tokens is None else _scales(tokens)
    if tokens is not None:
        grad = row_kernels.take(grad, tokens.order, ends, tokens.k, None)
    of_down_bias = of_scales = None
    if experts.down_bias is not None:
        of_down_bias, of_scales = kernels.bias_grad(grad, experts.down_bias, ends, scales)
    of_hidden = product(grad, experts.down, ends, not form.is_transposed, recipe)
    of_gate, of_up = torch.empty_like(gate), None if up is None else torch.empty_like(up)
    hidden, of_weights = kernels.gated_backward(
        of_hidden, *_halves(gate, up, form), ends, form, scales, *_halves(of_gate, of_up, form)
    )
    del of_hidden
    of_down = _outer(grad, hidden, ends, form)
    del hidden, grad
    rows = x if tokens is None else row_kernels.take(x, tokens.order, ends, tokens.k, None)
    of_gate_weight = _outer(of_gate, rows, ends, form)
    of_up_weight = None if of_up is None else _outer(of_up, rows, ends, form)
    del rows
    of_gate_bias = None if experts.gate_bias is None else kernels.bias_grad(of_gate, experts.gate_bias, ends, None)[0]
    of_rows = product(of_gate, experts.gate, ends, not form.is_transposed, recipe)
    if experts.up is not None and of_up is not None:
        of_rows += product(of_up, experts.up, ends, not form.is_transposed, recipe)
    if tokens is None:
        of_x, of_weights = row_kernels.clear_past(of_rows, ends), None
    else:
        of_x = row_kernels.combine(of_rows, tokens.slots, ends, tokens.k, None)
        total = of_weights if of_scales is None else of_weights + of_scales
        of_weights = _by_assignment(total, tokens)
    return Grads(of_x, of_weights, of_gate_weight, of_up_weight, of_down, of_gate_bias, of_down_bias)


def _scales(tokens: Tokens) -> torch.Tensor:
    """(rows,): each row's weight."""
    return tokens.weights.reshape(-1)[tokens.order]


def _by_assignment(of_scales: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """(tokens, k) from a row's gradient each."""
    of_rows = torch.where(tokens.slots < tokens.ends[-1], of_scales[tokens.slots], 0)
    return of_rows.view(tokens.weights.shape).to(tokens.weights.dtype)


def _halves(gate: torch.Tensor, up: torch.Tensor | None, form: GatedForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up, (rows, H) each with equal strides."""
    if up is not None:
        return gate, up
    if form.is_interleaved:
        return gate[:, ::2], gate[:, 1::2]
    size = gate.shape[1] // 2
    return gate[:, :size], gate[:, size:]


def _outer(of_result: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, form: GatedForm) -> torch.Tensor:
    """The gradient of weights that made results of rows."""
    return outer(rows, of_result, ends) if form.is_transposed else outer(of_result, rows, ends)
