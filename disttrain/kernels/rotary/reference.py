"""The rotation by torch's operators, for CPUs and fp64; it judges the kernel."""

from __future__ import annotations

import torch

from disttrain.kernels.choice import wide_dtype


def turn(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, result: torch.Tensor, is_interleaved: bool, is_back: bool
) -> None:
    """Write x, turned, into `result`, which may be x.

    Args: x  (batch, heads, S, E);  cos, sin  (S, E / 2);  is_back  by the negative angle.
    """
    if is_back:
        sin = -sin
    wide = x.to(wide_dtype(x.dtype), copy=True)
    if is_interleaved:
        first, second = wide[..., ::2], wide[..., 1::2]
        result[..., ::2] = first * cos - second * sin
        result[..., 1::2] = first * sin + second * cos
    else:
        first, second = wide.chunk(2, -1)
        half = x.shape[-1] // 2
        result[..., :half] = first * cos - second * sin
        result[..., half:] = first * sin + second * cos
