"""The norm of numbers that lie on several ranks."""

from __future__ import annotations

import math

import torch

from disttrain.process_group import ProcessGroup, ReduceOp, all_reduce


def norm_over_ranks(norm: torch.Tensor, norm_type: float, group: ProcessGroup) -> torch.Tensor:
    """The norm of all ranks' numbers, of each rank's. Collective: every rank of `group`."""
    if math.isinf(norm_type):
        # Whether a maximum passes NaN on is each transport's own affair.
        is_nan = norm.isnan()
        both = torch.stack([norm.masked_fill(is_nan, 0), is_nan.to(norm.dtype)])
        all_reduce(both, ReduceOp.MAX, group)
        return both[0].masked_fill(both[1] > 0, math.nan)
    power = norm**norm_type
    all_reduce(power, ReduceOp.SUM, group)
    return power ** (1 / norm_type)
