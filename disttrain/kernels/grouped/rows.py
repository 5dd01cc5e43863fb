"""Rows of tokens in the order of their experts, and back."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ExpertOrder(NamedTuple):
    """Where assignments of tokens to experts lie once they are sorted by expert.

    An assignment is one token's one choice: number `token * k + choice`. Those within an expert keep their order.
    """

    order: torch.Tensor
    """(assignments,) int64: the assignment that a sorted row holds."""
    slots: torch.Tensor
    """(assignments,) int64: the sorted row of an assignment, `order`'s inverse."""
    ends: torch.Tensor
    """(experts,) int32: the first row after each expert's; the last is the number of rows that have an expert."""


def sort_by_expert(experts: torch.Tensor, num_experts: int) -> ExpertOrder:
    """Sorts assignments by expert, stably, without a word to the host.

    Args: experts  integers of any shape; those outside of 0 to num_experts - 1 are dropped: their rows come last.
    """
    flat = experts.reshape(-1).to(torch.int64)
    flat = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)
    order = torch.argsort(flat, stable=True)
    slots = torch.empty_like(order)
    slots[order] = torch.arange(len(order), device=order.device)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )
    return ExpertOrder(order, slots, counts[:num_experts].cumsum(0).to(torch.int32))


def take_rows(x: torch.Tensor, order: ExpertOrder, k: int) -> torch.Tensor:
    """Copies each token's row to the sorted rows of its k assignments: (tokens, D) to (tokens * k, D)."""
    return x[order.order // k]


def combine_rows(rows: torch.Tensor, order: ExpertOrder, weights: torch.Tensor) -> torch.Tensor:
    """Sums each token's k sorted rows by its weights, in fp32: (tokens * k, D) and (tokens, k) to (tokens, D).

    Rows past the last expert's are dropped: they count as zeros.
    """
    tokens, k = weights.shape
    chosen = rows[order.slots].view(tokens, k, -1)
    wide = torch.promote_types(rows.dtype, torch.float32)
    is_kept = (order.slots < order.ends[-1]).view(tokens, k)
    factors = torch.where(is_kept, weights.to(wide), 0)
    return (chosen.to(wide).masked_fill(~is_kept[..., None], 0) * factors[..., None]).sum(1).to(rows.dtype)
