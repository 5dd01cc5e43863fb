"""Forwards that compute experts by grouped products, however the module is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttrain.kernels.grouped.rows import combine_rows, sort_by_expert, take_rows

OnRows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes all experts on rows that are sorted by expert, given the first row after each expert's."""


def routed(x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, num_experts: int, on_rows: OnRows) -> Any:
    """Sums each token's experts by their weights.

    Args:    x  (..., D), any number of tokens;  indices, weights  (tokens, k); indices that name no expert are dropped.
    Returns: like x.
    """
    tokens = x.reshape(-1, x.shape[-1])
    k = indices.shape[-1]
    order = sort_by_expert(indices.reshape(-1, k), num_experts)
    rows = on_rows(take_rows(tokens, order, k), order.ends)
    return combine_rows(rows, order, weights.reshape(-1, k)).to(x.dtype).view(x.shape)


def by_inputs(x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, num_experts: int, on_rows: OnRows) -> Any:
    """Sums each token's experts, each of which is given the token times its weight."""
    k = indices.shape[-1]
    tokens = x.reshape(-1, 1, x.shape[-1]) * weights.reshape(-1, k, 1).to(x.dtype)
    ones = torch.ones((), dtype=weights.dtype, device=x.device).expand(tokens.shape[0] * k, 1)
    out = routed(tokens.reshape(-1, x.shape[-1]), indices.reshape(-1, 1), ones, num_experts, on_rows)
    return out.view(tokens.shape).sum(1).view(x.shape)


def presorted(x: torch.Tensor, counts: torch.Tensor, num_experts: int, on_rows: OnRows) -> Any:
    """Computes rows that are sorted already: `counts` of each expert; what is left over becomes zeros."""
    del num_experts
    return on_rows(x, counts.cumsum(0).to(torch.int32))


def batched(x: torch.Tensor, num_experts: int, on_rows: OnRows) -> Any:
    """Computes rows that are sorted already, as many of each expert."""
    rows = x.reshape(-1, x.shape[-1])
    ends = torch.arange(1, num_experts + 1, device=x.device, dtype=torch.int32) * (len(rows) // num_experts)
    return on_rows(rows, ends)


def in_roles(values: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Tokens, indices and weights, which forwards take in either order; None for anything else."""
    if len(values) != 3 or not all(isinstance(value, torch.Tensor) for value in values):
        return None
    x, first, second = values
    if first.is_floating_point() and not second.is_floating_point():
        first, second = second, first
    is_so = not first.is_floating_point() and second.is_floating_point() and first.shape == second.shape
    return (x, first, second) if is_so else None


def bound(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The values of a call in the order of the forward's arguments; fewer where some are missing."""
    return [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]


