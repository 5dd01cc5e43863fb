"""The order of rows that have come in blocks, one after the other from each rank, by expert."""

from __future__ import annotations

from typing import Any

import torch

from disttrain.kernels.choice import has_triton
from disttrain.kernels.grouped.rows import ExpertOrder
from disttrain.settings import KERNELS, TRITON_INTERPRET


def arrange(counts: torch.Tensor, num_rows: int) -> ExpertOrder:
    """Orders rows that are sorted by expert within what each rank has sent.

    Args:    counts    (ranks, experts) int64 on the device: the rows of each block;  num_rows  all of them.
    Returns: the order by expert, then by rank; `order` has the row as it came, `slots` the sorted row.
    """
    can_launch = KERNELS.read() != "reference" and num_rows and (counts.is_cuda or TRITON_INTERPRET.read())
    if can_launch and has_triton():
        return ExpertOrder(*_kernels().arrange(counts, num_rows))
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


def _kernels() -> Any:
    # Triton is not on every machine, and slow to load.
    from disttrain.experts.exchange import triton_kernels

    return triton_kernels
