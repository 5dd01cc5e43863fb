"""Joins attention over some keys with attention over others, by the logarithms of the sums of their weights.

out = sum_i w_i out_i with w_i = exp(lse_i - lse) and lse = log sum_i exp(lse_i). Where nothing has been seen, lse is
-inf and out 0.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867).
"""

from __future__ import annotations

import torch

from disttrain.kernels.choice import wide_dtype


class Joined:
    """What queries have seen so far: `out` (B, H, L, Ev) and `lse` (B, H, L), in fp32 or wider."""

    def __init__(self, query: torch.Tensor, value_dim: int) -> None:
        wide, shape = wide_dtype(query.dtype), query.shape[:3]
        # Position by position, as torch's kernels have it: models then take all heads together without a copy, which
        # would be kept beside this.
        self.out = query.new_zeros((shape[0], shape[2], shape[1], value_dim), dtype=wide).transpose(1, 2)
        self.lse = query.new_full(shape, -torch.inf, dtype=wide)

    def add(self, queries: range, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Adds what the queries at these places see of other keys."""
        out_so_far = self.out[:, :, queries.start : queries.stop]
        lse_so_far = self.lse[:, :, queries.start : queries.stop]
        lse = lse.to(lse_so_far.dtype)
        joined = torch.logaddexp(lse_so_far, lse)
        # Less than any score, and more than -inf, of which differences are nan.
        weight = (lse - joined.clamp(min=torch.finfo(joined.dtype).min)).exp_()
        out_so_far.lerp_(out.to(out_so_far.dtype), weight.unsqueeze(-1))
        lse_so_far.copy_(joined)
