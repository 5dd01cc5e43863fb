"""Products of sorted rows with each expert's own weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from disttrain.kernels.grouped.form import GatedForm


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_transposed: bool = False,
) -> torch.Tensor:
    """Multiplies each expert's rows by its weight.

    Args:    x       (rows, in), sorted by expert.
             weight  (experts, out, in), or (experts, in, out) where `is_transposed`.
             ends    (experts,) int32 on x's device, as of `ExpertOrder`.
             bias    (experts, out).
    Returns: (rows, out); zeros in rows past the last end.
    """
    outs = []
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        matrix = weight[expert].T if is_transposed else weight[expert]
        outs.append(F.linear(x[begin:end], matrix, None if bias is None else bias[expert]))
        begin = end
    outs.append(x.new_zeros(len(x) - begin, weight.shape[2 if is_transposed else 1]))
    return torch.cat(outs)


def expert_mlp(
    x: torch.Tensor,
    ends: torch.Tensor,
    gate_up: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    down: torch.Tensor,
    form: GatedForm,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes all experts' gated layers on rows that are sorted by expert.

    Args:    x         (rows, D), sorted by expert.
             ends      (experts,) int32 on x's device: the first row after each expert's.
             gate_up   (experts, 2 H, D), or the two halves (experts, H, D) apart; transposed as `form` says.
             down      (experts, D, H).
             gate_up_bias, down_bias  (experts, 2 H) and (experts, D).
    Returns: (rows, D); zeros in rows past the last end.
    """
    if isinstance(gate_up, tuple):
        gate, up = (grouped_linear(x, half, ends, is_transposed=form.is_transposed) for half in gate_up)
    else:
        both = grouped_linear(x, gate_up, ends, gate_up_bias, is_transposed=form.is_transposed)
        gate, up = (both[..., ::2], both[..., 1::2]) if form.is_interleaved else both.chunk(2, dim=-1)
    return grouped_linear(gated(gate, up, form), down, ends, down_bias, is_transposed=form.is_transposed)


def gated(gate: torch.Tensor, up: torch.Tensor, form: GatedForm) -> torch.Tensor:
    """activation(gate) * up in fp32 at least, rounded once."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    a, b = gate.to(wide), up.to(wide)
    if form.activation == "clamped":
        a, b = a.clamp(max=form.limit), b.clamp(-form.limit, form.limit)
        return (a * torch.sigmoid(form.alpha * a) * (b + 1)).to(gate.dtype)
    activated = F.silu(a) if form.activation == "silu" else F.gelu(a, approximate=_approximate(form))
    return (activated * b).to(gate.dtype)


def _approximate(form: GatedForm) -> str:
    return "tanh" if form.activation == "gelu_tanh" else "none"
