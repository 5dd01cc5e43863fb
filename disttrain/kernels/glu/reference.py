"""The gated products by torch's operators, for CPUs and fp64; they judge the kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from disttrain.kernels.choice import wide_dtype


def forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up; all (rows, D), perhaps with gaps between rows."""
    wide = gate.to(wide_dtype(gate.dtype))
    return (_activated(wide, activation) * up).to(gate.dtype)


def backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up, contiguous."""
    wide, wide_grad = (tensor.to(wide_dtype(gate.dtype)) for tensor in (gate, grad))
    if activation == "silu":
        grad_gate = torch.ops.aten.silu_backward(wide_grad * up, wide)
    else:
        grad_gate = torch.ops.aten.gelu_backward(wide_grad * up, wide, approximate=_approximate(activation))
    grad_up = wide_grad * _activated(wide, activation)
    return grad_gate.to(gate.dtype).contiguous(), grad_up.to(gate.dtype).contiguous()


def _activated(gate: torch.Tensor, activation: str) -> torch.Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate=_approximate(activation))


def _approximate(activation: str) -> str:
    return "tanh" if activation == "gelu_tanh" else "none"
