"""Joins two results of attention by torch's operators."""

from __future__ import annotations

import torch


def join(out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Adds what has been seen of other keys to `out` (B, H, L, Ev) and `lse` (B, H, L), which are wide."""
    other_lse = other_lse.to(lse.dtype)
    joined = torch.logaddexp(lse, other_lse)
    # Less than any score, and more than -inf, of which differences are nan.
    weight = (other_lse - joined.clamp(min=torch.finfo(joined.dtype).min)).exp_()
    out.lerp_(other_out.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(joined)
