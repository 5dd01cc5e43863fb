"""The arrangement of rows that have come, in one launch; what it computes is what `arrangement.py` does."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

_BLOCK: Final = 256
_SPLITS: Final = 8
"""Programs that share the rows of one block: all tokens may have gone to one expert."""


@triton.jit
def _arrange(
    counts, order, slots, ends, num_ranks, num_experts,
    RANKS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    ranks = tl.arange(0, RANKS)[:, None]
    experts = tl.arange(0, EXPERTS)[None, :]
    is_there = (ranks < num_ranks) & (experts < num_experts)
    rows = tl.load(counts + ranks * num_experts + experts, mask=is_there, other=0)
    by_rank = tl.sum(rows, 1)
    by_expert = tl.sum(rows, 0)
    begin_of_rank = tl.cumsum(by_rank, 0) - by_rank
    end_of_expert = tl.cumsum(by_expert, 0)
    come = tl.cumsum(rows, 1) - rows + begin_of_rank[:, None]
    sorted_ = tl.cumsum(rows, 0) - rows + (end_of_expert - by_expert)[None, :]
    program = tl.program_id(0)
    if program == 0:
        places = tl.arange(0, EXPERTS)
        tl.store(ends + places, end_of_expert.to(tl.int32), mask=places < num_experts)
    block = program // SPLITS
    is_own = (ranks == block // num_experts) & (experts == block % num_experts)
    size = tl.sum(tl.sum(tl.where(is_own, rows, 0), 1), 0)
    first_come = tl.sum(tl.sum(tl.where(is_own, come, 0), 1), 0)
    first_sorted = tl.sum(tl.sum(tl.where(is_own, sorted_, 0), 1), 0)
    for begin in range((program % SPLITS) * BLOCK, size, SPLITS * BLOCK):
        numbers = begin + tl.arange(0, BLOCK)
        tl.store(order + first_sorted + numbers, first_come + numbers, mask=numbers < size)
        tl.store(slots + first_come + numbers, first_sorted + numbers, mask=numbers < size)


def arrange(counts: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Order, slots and ends as in `arrangement.py`."""
    num_ranks, num_experts = counts.shape
    order, slots = torch.empty((2, num_rows), dtype=torch.int64, device=counts.device).unbind()
    ends = torch.empty(num_experts, dtype=torch.int32, device=counts.device)
    sides: Any = (triton.next_power_of_2(num_ranks), triton.next_power_of_2(num_experts))
    with torch.cuda.device_of(counts):
        _arrange[(num_ranks * num_experts * _SPLITS,)](
            counts, order, slots, ends, num_ranks, num_experts, *sides, _BLOCK, _SPLITS
        )
    return order, slots, ends
