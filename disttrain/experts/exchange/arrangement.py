"""The order of rows that have come in blocks, one after the other from each rank, by expert."""

from __future__ import annotations

import torch

from disttrain.experts.exchange.sizes import launches, triton_kernels
from disttrain.kernels.grouped.rows import ExpertOrder


def arrange(counts: torch.Tensor, num_rows: int) -> ExpertOrder:
    """Orders rows that are sorted by expert within what each rank has sent.

    Args:    counts    (ranks, experts) on the device, in whole numbers of any dtype: the rows of each block.
             num_rows  all of them.
    Returns: the order by expert, then by rank; `order` has the row as it came, `slots` the sorted row.
    """
    if num_rows and counts.numel() and launches(counts):
        return ExpertOrder(*triton_kernels().arrange(counts, num_rows))
    counts = counts.to(torch.int64)
    begins_as_come = _begins(counts)
    begins_sorted = _begins(counts.T).T
    shifts = (begins_sorted - begins_as_come).reshape(-1)
    numbers = torch.arange(num_rows, device=counts.device)
    slots = numbers + torch.repeat_interleave(shifts, counts.reshape(-1), output_size=num_rows)
    order = torch.empty_like(slots).scatter_(0, slots, numbers)
    return ExpertOrder(order, slots, counts.sum(0).cumsum(0).to(torch.int32))


def _begins(counts: torch.Tensor) -> torch.Tensor:
    """Where each block begins, of those that lie one after the other along the last dim and then the first."""
    flat = counts.reshape(-1)
    return (flat.cumsum(0) - flat).view(counts.shape)
