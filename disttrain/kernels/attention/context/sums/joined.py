"""Joins attention over some keys with attention over others, by the logarithms of the sums of their weights.

out = sum_i w_i out_i with w_i = exp(lse_i - lse) and lse = log sum_i exp(lse_i). Where nothing has been seen, lse is
-inf and out 0.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from disttrain.kernels.attention.context.sums import reference
from disttrain.kernels.attention.context.sums.sums import Unwritten, part_of
from disttrain.kernels.choice import choose, wide_dtype


def empty_by_positions(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for (B, H, L, Ev), position by position, as torch's kernels have it.

    Models then take all heads together without a copy, which would be kept beside this.
    """
    batch_size, num_heads, length, width = shape
    return like.new_empty((batch_size, length, num_heads, width), dtype=dtype).transpose(1, 2)


class Joined:
    """Attention of queries (B, H, L, E) over the keys so far: (B, H, L, Ev) and sums (B, H, L), in fp32 or wider."""

    def __init__(self, query: torch.Tensor, value_dim: int) -> None:
        wide, shape = wide_dtype(query.dtype), query.shape[:3]
        self._out = empty_by_positions(query, (*shape, value_dim), wide)
        self._lse = query.new_empty(shape, dtype=wide)
        self._unwritten = Unwritten(shape[2])

    def add(self, queries: range, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Adds what the queries at these places see of other keys."""
        for run, is_unwritten in self._unwritten.take(queries):
            within = range(run.start - queries.start, run.stop - queries.start)
            own_out, own_lse = part_of(self._out, run), part_of(self._lse, run)
            other_out, other_lse = part_of(out, within), part_of(lse, within)
            if is_unwritten:
                own_out.copy_(other_out)
                own_lse.copy_(other_lse)
            else:
                _module_for(own_out).join(own_out, own_lse, other_out, other_lse)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All of it."""
        for run in self._unwritten:
            part_of(self._out, run).zero_()
            part_of(self._lse, run).fill_(-torch.inf)
        self._unwritten = Unwritten(0)
        return self._out, self._lse


def _module_for(out: torch.Tensor) -> ModuleType:
    obstacle = "The kernel computes in 32 bits." if out.dtype == torch.float64 else ""
    return choose("attention", out, obstacle, reference, _load)


def _load() -> ModuleType:
    # Triton is not on every machine, and slow to load.
    from disttrain.kernels.attention.context.sums import triton_kernels as join_triton

    return join_triton
