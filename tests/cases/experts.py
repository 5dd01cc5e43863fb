"""Experts' layers one token at a time, as a judge of products by expert."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from disttrain.kernels.grouped.form import ACTIVATIONS, GatedForm
from disttrain.kernels.grouped.products import expert_mlp, mix_experts
from disttrain.kernels.grouped.rows import combine_rows, sort_by_expert, take_rows


@dataclass
class Experts:
    """Weights of experts of one form; `halves` of gate and up are one tensor or two."""

    form: GatedForm
    halves: list[torch.Tensor]
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.halves, self.down, *(bias for bias in (self.gate_up_bias, self.down_bias) if bias is not None)]

    def like(self, tensors: list[torch.Tensor]) -> Experts:
        """The same form of other weights."""
        count = len(self.halves)
        biases = tensors[count + 1 :] if self.gate_up_bias is not None else [None, None]
        return Experts(self.form, tensors[:count], tensors[count], *biases)

    def arguments(self) -> tuple[tuple[torch.Tensor, torch.Tensor] | torch.Tensor, torch.Tensor, GatedForm]:
        halves = self.halves
        return (halves[0], halves[1]) if len(halves) == 2 else halves[0], self.down, self.form

    def biases(self) -> dict[str, torch.Tensor | None]:
        return {"gate_up_bias": self.gate_up_bias, "down_bias": self.down_bias}


def forms() -> Iterator[tuple[GatedForm, bool, bool]]:
    """Each activation and layout, whether halves are apart, and whether there are biases."""
    for activation, is_interleaved, is_transposed in itertools.product(ACTIVATIONS, (False, True), (False, True)):
        form = GatedForm(activation, is_interleaved, is_transposed, 1.0 if activation == "clamped" else 0.0, 1.7)
        yield form, False, is_transposed or activation == "clamped"
        if not is_interleaved:
            yield form, True, False


def drawn_experts(num_experts: int, dim: int, hidden: int, form: GatedForm, is_apart: bool, has_bias: bool) -> Experts:
    """Weights in fp64, scaled so that results are about one."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator) * scale

    widths = [hidden, hidden] if is_apart else [2 * hidden]
    into = [(num_experts, dim, width) if form.is_transposed else (num_experts, width, dim) for width in widths]
    back = (num_experts, hidden, dim) if form.is_transposed else (num_experts, dim, hidden)
    halves = [draw(*shape, scale=dim**-0.5) for shape in into]
    biases = [draw(num_experts, size, scale=0.3) for size in (2 * hidden, dim)] if has_bias else [None, None]
    return Experts(form, halves, draw(*back, scale=hidden**-0.5), *biases)


def token_by_token(x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Each token's weighted sum of its experts' layers; an index that is no expert's counts as zero."""
    # Whatever was not chosen has a gradient of zeros.
    nothing = 0 * sum(tensor.sum() for tensor in (weights, *experts.tensors))
    rows = []
    for token, chosen in enumerate(indices.tolist()):
        parts = [
            weights[token, choice] * _layer(x[token], expert, experts)
            for choice, expert in enumerate(chosen)
            if 0 <= expert < len(experts.down)
        ]
        rows.append(sum(parts, 0 * x[token] + nothing))
    return torch.stack(rows)


def _layer(x: torch.Tensor, expert: int, experts: Experts) -> torch.Tensor:
    form = experts.form
    parts = [_times(x, half[expert], form) for half in experts.halves]
    if experts.gate_up_bias is not None:
        parts[0] = parts[0] + experts.gate_up_bias[expert]
    if form.is_interleaved:
        gate, up = parts[0][::2], parts[0][1::2]
    else:
        gate, up = torch.cat(parts).chunk(2)
    if form.activation == "clamped":
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
        hidden = (up + 1) * gate * torch.sigmoid(form.alpha * gate)
    elif form.activation == "silu":
        hidden = F.silu(gate) * up
    else:
        hidden = F.gelu(gate, approximate="tanh" if form.activation == "gelu_tanh" else "none") * up
    result = _times(hidden, experts.down[expert], form)
    return result if experts.down_bias is None else result + experts.down_bias[expert]


def _times(x: torch.Tensor, matrix: torch.Tensor, form: GatedForm) -> torch.Tensor:
    return x @ matrix if form.is_transposed else matrix @ x


def at_once(x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
    order = sort_by_expert(indices, len(experts.down))
    return mix_experts(x, order, weights, *experts.arguments(), **experts.biases())


def step_by_step(x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
    order = sort_by_expert(indices, len(experts.down))
    rows = take_rows(x, order, indices.shape[1])
    return combine_rows(expert_mlp(rows, order.ends, *experts.arguments(), **experts.biases()), order, weights)
