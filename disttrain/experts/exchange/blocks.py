"""Where rows go that are written straight into other ranks' memory, computed on the device from all ranks' counts.

A block is what goes from one rank to one expert. Tests hold the numbers against `tests/cases/exchange_plan.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from disttrain.experts.exchange.expert_cut import ExpertCut


class Blocks(NamedTuple):
    """Rows that lie one behind the other, block by block, and where each block goes. int64, one number per block."""

    ends: torch.Tensor
    """The first row after each block."""
    targets: torch.Tensor
    """The group rank that each block goes to."""
    firsts: torch.Tensor
    """The row there of its first row."""


class Paths(NamedTuple):
    """The ways of one exchange, as one rank goes them."""

    there: Blocks
    """Of this rank's assignments, which are sorted by expert."""
    back: Blocks
    """Of the rows at this rank's experts, which are sorted by expert and then by where they have come from."""
    ends: torch.Tensor
    """(experts of this rank,) int32: the first row after each one's."""


def paths_of(counts: torch.Tensor, cut: ExpertCut, rank: int) -> Paths:
    """The paths from or to group rank `rank`.

    Args: counts  (ranks, ranks * chunk): the rows of each rank for each expert, and zeros where a rank has fewer.
    """
    size, chunk = cut.num_ranks, cut.chunk
    rows = counts.to(torch.int64).view(size, size, chunk)  # from, to, for which of its experts
    totals = rows.sum(0)
    ends = totals.cumsum(1)
    landings = (ends - totals) + (rows.cumsum(0) - rows)
    flat = rows.view(size, -1)
    homes = (flat.cumsum(1) - flat).view_as(rows)
    ranks = torch.arange(size, device=counts.device)
    there = _side_by_side(
        flat[rank].cumsum(0),
        ranks[:, None].expand(-1, chunk).reshape(-1),
        landings[rank].reshape(-1),
    )
    back = _side_by_side(
        rows[:, rank].T.reshape(-1).cumsum(0),
        ranks.expand(chunk, -1).reshape(-1),
        homes[:, rank].T.reshape(-1),
    )
    return Paths(there, back, ends[rank, : cut.num_experts_of(rank)].to(torch.int32))


def _side_by_side(ends: torch.Tensor, targets: torch.Tensor, firsts: torch.Tensor) -> Blocks:
    """For a kernel: where a rank has one expert, these may be views with gaps."""
    return Blocks(ends.contiguous(), targets.contiguous(), firsts.contiguous())
