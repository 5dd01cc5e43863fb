"""Rows and products by expert from torch's operators, for CPUs and fp64; they judge the kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from disttrain.kernels.choice import wide_dtype
from disttrain.kernels.grouped.form import GatedForm


def sort(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(assignments,) int64 to order, slots and ends, as of `ExpertOrder`."""
    buckets = torch.where((experts < 0) | (experts >= num_experts), num_experts, experts)
    order = torch.argsort(buckets, stable=True)
    slots = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=order.device)
    counts.scatter_add_(0, buckets, torch.ones_like(buckets))
    return order, slots, counts[:num_experts].cumsum(0).to(torch.int32)


def take(x: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, k: int, scales: torch.Tensor | None) -> torch.Tensor:
    """The rows of `x` (tokens, D) in the order of their assignments, each times its assignment's scale; zeros past the
    last end."""
    rows = x[order // k]
    is_kept = _is_kept(rows, ends)
    if scales is None:
        return torch.where(is_kept[:, None], rows, 0)
    wide = wide_dtype(x.dtype)
    scaled = rows.to(wide) * scales.reshape(-1)[order].to(wide)[:, None]
    return torch.where(is_kept[:, None], scaled, 0).to(x.dtype)


def combine(
    rows: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor, k: int, weights: torch.Tensor | None
) -> torch.Tensor:
    """Each token's sum of its k rows times their weights, without those past the last end."""
    wide = wide_dtype(rows.dtype)
    is_kept = slots < ends[-1]
    chosen = torch.where(is_kept[:, None], rows[torch.where(is_kept, slots, 0)].to(wide), 0)
    if weights is not None:
        chosen = chosen * weights.reshape(-1, 1).to(wide)
    return chosen.view(len(slots) // k, k, rows.shape[-1]).sum(1).to(rows.dtype)


def products_with(
    grad: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor, k: int
) -> torch.Tensor:
    """(tokens * k,) in fp32 at least: the product of a token's gradient with each of its rows; 0 for dropped ones."""
    wide = wide_dtype(rows.dtype)
    is_kept = slots < ends[-1]
    chosen = torch.where(is_kept[:, None], rows[torch.where(is_kept, slots, 0)].to(wide), 0)
    return (chosen.view(len(slots) // k, k, rows.shape[-1]) * grad.to(wide)[:, None]).sum(-1).reshape(-1)


def product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """Each expert's rows times its weight, (out, in), or (in, out) if transposed; zeros past the last end."""
    results = []
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        results.append(x[begin:end] @ (weight[expert] if is_transposed else weight[expert].T))
        begin = end
    results.append(x.new_zeros(len(x) - begin, weight.shape[2 if is_transposed else 1]))
    return torch.cat(results)


def outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """(experts, A, B): for each expert its rows of `left` (rows, A), transposed, times those of `right` (rows, B)."""
    result = left.new_empty(len(ends), left.shape[1], right.shape[1])
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        torch.mm(left[begin:end].T, right[begin:end], out=result[expert])
        begin = end
    return result


def clear_past(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Zeros the rows past the last end, in place."""
    rows[int(ends[-1]) :] = 0
    return rows


def add_bias(
    rows: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor, order: torch.Tensor | None, weights: torch.Tensor | None
) -> torch.Tensor:
    """Adds to each row its expert's bias, times its assignment's weight, in place."""
    experts, is_kept = _experts_of(rows, ends)
    wide = wide_dtype(rows.dtype)
    added = torch.where(is_kept[:, None], bias[experts].to(wide), 0)
    return rows.copy_(rows + added * _scales(order, weights, wide))


def bias_grad(
    grad: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor, order: torch.Tensor | None, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of `add_bias`'s bias (experts, D) and weights (assignments,), these in fp32 at least."""
    experts, is_kept = _experts_of(grad, ends)
    wide = wide_dtype(grad.dtype)
    kept = torch.where(is_kept[:, None], grad.to(wide), 0)
    of_bias = torch.zeros(bias.shape, dtype=wide, device=bias.device)
    of_bias.index_add_(0, experts, kept * _scales(order, weights, wide))
    return of_bias.to(bias.dtype), _by_assignment((kept * bias[experts].to(wide)).sum(1), order)


def gated(
    gate: torch.Tensor,
    up: torch.Tensor,
    ends: torch.Tensor,
    form: GatedForm,
    order: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """activation(gate) * up, (rows, H), times the row's weight; computed in fp32 at least and rounded once.

    Args: order, weights  (assignments,) and (tokens, k): a row's weight is its assignment's; None for one.
    """
    wide = wide_dtype(gate.dtype)
    activated, factor = _halves(gate.to(wide), up.to(wide), form)
    result = activated * factor * _scales(order, weights, wide)
    return torch.where(_is_kept(gate, ends)[:, None], result, 0).to(gate.dtype)


def gated_backward(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    ends: torch.Tensor,
    form: GatedForm,
    order: torch.Tensor | None,
    weights: torch.Tensor | None,
    grad_gate: torch.Tensor,
    grad_up: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Writes the gradients of gate and up; returns what `gated` returned, and the gradient of weights (assignments,).

    `grad` may be overwritten.
    """
    wide = wide_dtype(gate.dtype)
    is_kept = _is_kept(gate, ends)[:, None]
    a, b = gate.to(wide), up.to(wide)
    activated, factor = _halves(a, b, form)
    scales = _scales(order, weights, wide)
    wished = torch.where(is_kept, grad.to(wide), 0)
    scaled = wished * scales
    grad_gate.copy_(torch.where(is_kept, _through_gate(scaled * factor, a, form), 0))
    is_inside = (b.abs() <= form.limit) if form.activation == "clamped" else True
    grad_up.copy_(torch.where(is_kept & is_inside, scaled * activated, 0))
    value = torch.where(is_kept, activated * factor, 0)
    return (value * scales).to(gate.dtype), _by_assignment((wished * value).sum(1), order)


def _scales(order: torch.Tensor | None, weights: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | float:
    """(rows, 1): each row's weight, one where there are none."""
    if order is None or weights is None:
        return 1.0
    return weights.reshape(-1)[order].to(dtype)[:, None]


def _by_assignment(of_rows: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor | None:
    return None if order is None else torch.empty_like(of_rows).scatter_(0, order, of_rows)


def _halves(gate: torch.Tensor, up: torch.Tensor, form: GatedForm) -> tuple[torch.Tensor, torch.Tensor]:
    """The activated gate, and what it is multiplied with."""
    if form.activation == "clamped":
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
        return gate * torch.sigmoid(form.alpha * gate), up + 1
    return (F.silu(gate) if form.activation == "silu" else F.gelu(gate, approximate=_approximate(form))), up


def _through_gate(grad: torch.Tensor, gate: torch.Tensor, form: GatedForm) -> torch.Tensor:
    """The gradient of the gate, from that of its activation."""
    if form.activation == "clamped":
        share = torch.sigmoid(form.alpha * gate)
        return grad * share * (1 + form.alpha * gate * (1 - share)) * (gate <= form.limit)
    if form.activation == "silu":
        return torch.ops.aten.silu_backward(grad, gate)  # type: ignore[no-any-return]
    return torch.ops.aten.gelu_backward(grad, gate, approximate=_approximate(form))  # type: ignore[no-any-return]


def _approximate(form: GatedForm) -> str:
    return "tanh" if form.activation == "gelu_tanh" else "none"


def _is_kept(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(rows), device=rows.device) < ends[-1]


def _experts_of(rows: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's expert, 0 for those past the last end, and which have one."""
    index = torch.arange(len(rows), device=rows.device, dtype=ends.dtype)
    experts = torch.searchsorted(ends, index, right=True)
    is_kept = experts < len(ends)
    return torch.where(is_kept, experts, 0), is_kept
