"""Operators that are computed by others on DTensors, since the size of their result depends on values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from disttrain.dtensor._torch import OpOverload


def _bincount(values: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    """Every rank counts its own, once the ranks have agreed on how many bins there are."""
    num_bins = minlength
    if values.numel():
        least, most = (int(end.item()) for end in values.aminmax())
        if values.ndim != 1 or least < 0:
            raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
        num_bins = max(minlength, most + 1)
    if weights is None:
        weights = torch.ones_like(values, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.to(torch.float64)
    bins = weights.new_zeros(num_bins)
    return bins.scatter_add(0, values.to(torch.int64), weights) if num_bins else bins


BY_OTHERS: Final[dict[OpOverload, Callable[..., Any]]] = {torch.ops.aten.bincount.default: _bincount}
