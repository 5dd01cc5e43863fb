"""Numbers of rows, on the device: for each expert, and as an expert's room allows."""

from __future__ import annotations

import math

import torch

from disttrain.experts.exchange.plan import ExpertCut
from disttrain.kernels.grouped.rows import ExpertOrder, sort_by_expert


def counts_of(ends: torch.Tensor, cut: ExpertCut) -> torch.Tensor:
    """(ranks, chunk): the rows for each rank's experts, from where each expert's end."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    num_places = cut.num_ranks * cut.chunk
    if num_places != cut.num_experts:
        counts = torch.nn.functional.pad(counts, (0, num_places - cut.num_experts))
    return counts.view(cut.num_ranks, cut.chunk)


def room_of(capacity: float, num_assignments: int, num_experts: int) -> int:
    """The assignments of one rank that an expert takes at most: `capacity` times its even share."""
    return max(1, math.ceil(capacity * num_assignments / num_experts))


def keep_earliest(indices: torch.Tensor, order: ExpertOrder, num_experts: int, room: int) -> ExpertOrder:
    """The order in which each expert has its first `room` assignments only, by token and then by choice."""
    flat = indices.reshape(-1).to(torch.int64)
    begins = order.ends - order.ends.diff(prepend=order.ends.new_zeros(1))
    number_at_expert = order.slots - begins[flat.clamp(0, num_experts - 1)]
    return sort_by_expert(flat.masked_fill(number_at_expert >= room, num_experts), num_experts)
