"""nn.RMSNorm and nn.LayerNorm that use the kernels, and take a residual path."""

from __future__ import annotations

import torch
from torch import nn

from disttrain.autocast import is_within_autocast
from disttrain.kernels._torch import has_hooks
from disttrain.kernels.norms.operator import layer_norm, rms_norm

Normed = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class KernelRMSNorm(nn.RMSNorm):
    """RMSNorm over one dim, as nn.RMSNorm; with a residual (as x) also what it normed, x + residual."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:  # type: ignore[override]
        if fits(x, self.weight, residual):
            return rms_norm(x, self.weight, self.eps, residual=residual)
        return super().forward(x) if residual is None else _apart(self, x, residual)


class KernelLayerNorm(nn.LayerNorm):
    """LayerNorm over one dim, as nn.LayerNorm; with a residual (as x) also what it normed, x + residual."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:  # type: ignore[override]
        if fits(x, self.weight, residual):
            return layer_norm(x, self.weight, self.bias, self.eps, residual=residual)
        return super().forward(x) if residual is None else _apart(self, x, residual)


KERNEL_OF = {nn.RMSNorm: KernelRMSNorm, nn.LayerNorm: KernelLayerNorm}


def fits(x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None) -> bool:
    """True where the kernels give what torch gives: one dtype, and no autocast, which has rules of its own."""
    if is_within_autocast(x.device) or (weight is not None and weight.dtype != x.dtype):
        return False
    return residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)


def add_then_norm(norm: nn.Module, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """norm(x + residual), and the sum; hooks, and what has become of the module meanwhile, take the sum alone."""
    if type(norm) in (KernelRMSNorm, KernelLayerNorm) and not has_hooks(norm):
        normed: tuple[torch.Tensor, torch.Tensor] = norm(x, residual=residual)
        return normed
    return _apart(norm, x, residual)


def _apart(norm: nn.Module, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return norm(total), total
