"""Numbers of rows, on the device: for each expert, and as an expert's room allows."""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from disttrain.experts.exchange.expert_cut import ExpertCut
from disttrain.kernels.choice import has_triton
from disttrain.kernels.grouped.rows import ExpertOrder, sort_by_expert
from disttrain.settings import KERNELS, TRITON_INTERPRET


def counts_of(ends: torch.Tensor, cut: ExpertCut) -> torch.Tensor:
    """(ranks, chunk): the rows for each rank's experts, from where each expert's end."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    num_places = cut.num_ranks * cut.chunk
    if num_places != cut.num_experts:
        counts = torch.nn.functional.pad(counts, (0, num_places - cut.num_experts))
    return counts.view(cut.num_ranks, cut.chunk)


TAG: Final = 1 << 40
"""What a total is more for each step of a tag: more than rows there may be, and still whole in fp64."""


def packed(ends: torch.Tensor, cut: ExpertCut, weights: torch.Tensor | None, tag: int = 0) -> torch.Tensor:
    """(2, ranks, chunk + 2): in the first half the rows for each rank's experts, their total, and the weights' sum.

    In double precision, which holds counts exactly, and shows what is not finite. The second half is for what comes.
    `tag`: a number below 2 ** 12 that goes with the totals, times TAG.
    """
    chunk = cut.chunk
    finding = None
    if weights is not None:
        finding = weights.detach().sum(dtype=torch.float64)
    if launches(ends):
        return triton_kernels().pack(ends, finding, cut.num_ranks, chunk, tag)  # type: ignore[no-any-return]
    sizes = torch.zeros((2, cut.num_ranks, chunk + 2), dtype=torch.float64, device=ends.device)
    sizes[0, :, :chunk] = counts = counts_of(ends, cut)
    sizes[0, :, chunk] = counts.sum(1) + tag * TAG
    if finding is not None:
        sizes[0, :, chunk + 1] = finding
    return sizes


def room_of(capacity: float, num_assignments: int, num_experts: int) -> int:
    """The assignments of one rank that an expert takes at most: `capacity` times its even share."""
    return max(1, math.ceil(capacity * num_assignments / num_experts))


def keep_earliest(indices: torch.Tensor, order: ExpertOrder, num_experts: int, room: int) -> ExpertOrder:
    """The order in which each expert has its first `room` assignments only, by token and then by choice."""
    flat = indices.reshape(-1).to(torch.int64)
    begins = order.ends - order.ends.diff(prepend=order.ends.new_zeros(1))
    number_at_expert = order.slots - begins[flat.clamp(0, num_experts - 1)]
    return sort_by_expert(flat.masked_fill(number_at_expert >= room, num_experts), num_experts)


def launches(sizes: torch.Tensor) -> bool:
    """True where Triton's kernels compute what follows from `sizes`."""
    return bool((sizes.is_cuda or TRITON_INTERPRET.read()) and KERNELS.read() != "reference" and has_triton())


def triton_kernels() -> Any:
    """The module with kernels."""
    # Triton is not on every machine, and slow to load.
    from disttrain.experts.exchange import triton_kernels as kernels

    return kernels
