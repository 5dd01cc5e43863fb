"""Numbers of rows and their arrangement, in one launch each, as `sizes.py` and `arrangement.py` compute them."""

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
    counts, order, slots, ends, stride, num_ranks, num_experts,
    RANKS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    ranks = tl.arange(0, RANKS)[:, None]
    experts = tl.arange(0, EXPERTS)[None, :]
    is_there = (ranks < num_ranks) & (experts < num_experts)
    rows = tl.load(counts + ranks * stride + experts, mask=is_there, other=0).to(tl.int64)
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
            counts, order, slots, ends, counts.stride(0), num_ranks, num_experts, *sides, _BLOCK, _SPLITS
        )
    return order, slots, ends


@triton.jit
def _pack(ends, finding, sizes, num_experts, chunk, tag, HAS_FINDING: tl.constexpr, CHUNK: tl.constexpr):
    rank = tl.program_id(0)
    places = tl.arange(0, CHUNK)
    expert = rank * chunk + places
    is_there = (places < chunk) & (expert < num_experts)
    end = tl.load(ends + expert, mask=is_there, other=0)
    begin = tl.load(ends + expert - 1, mask=is_there & (expert > 0), other=0)
    line = sizes + rank * (chunk + 2)
    count = end - begin
    tl.store(line + places, count.to(tl.float64), mask=places < chunk)
    # The unit of `TAG` in `sizes.py`: whole in any floating point.
    tl.store(line + chunk, tl.sum(count, 0).to(tl.float64) + tag * 1099511627776.0)
    total = tl.load(finding).to(tl.float64) if HAS_FINDING else 0.0
    tl.store(line + chunk + 1, total)


def pack(ends: torch.Tensor, finding: torch.Tensor | None, num_ranks: int, chunk: int, tag: int = 0) -> torch.Tensor:
    """Sizes as in `sizes.py`; what comes is not there yet."""
    sizes = torch.empty((2, num_ranks, chunk + 2), dtype=torch.float64, device=ends.device)
    has_finding = finding is not None
    with torch.cuda.device_of(ends):
        _pack[(num_ranks,)](
            ends,
            finding if has_finding else ends,
            sizes,
            ends.shape[0],
            chunk,
            tag,
            has_finding,
            triton.next_power_of_2(chunk),
        )
    return sizes


@triton.jit
def _push_rows(
    rows, ends, targets, firsts, addresses, row_size,
    NUM_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program takes every so many-th row, and writes it to the memory of the rank that its block goes to."""
    blocks = tl.arange(0, BLOCKS)
    last = tl.load(ends + NUM_BLOCKS - 1)
    all_ends = tl.load(ends + blocks, mask=blocks < NUM_BLOCKS, other=last + 1)
    for row in range(tl.program_id(0).to(tl.int64), last, tl.num_programs(0)):
        block = tl.sum((all_ends <= row).to(tl.int32), 0)
        begin = tl.load(ends + block - 1, mask=block > 0, other=0)
        address = tl.load(addresses + tl.load(targets + block))
        target = address.to(tl.pointer_type(rows.dtype.element_ty))
        target += (tl.load(firsts + block) + row - begin) * row_size
        source = rows + row * row_size
        for column in range(0, row_size, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            value = tl.load(source + columns, mask=columns < row_size)
            tl.store(target + columns, value, mask=columns < row_size)


@triton.jit
def _copy_rows(source, target, count, row_size, COLUMNS: tl.constexpr):
    for row in range(tl.program_id(0).to(tl.int64), tl.load(count), tl.num_programs(0)):
        begin = row * row_size
        for column in range(0, row_size, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            value = tl.load(source + begin + columns, mask=columns < row_size)
            tl.store(target + begin + columns, value, mask=columns < row_size)


_NUM_PROGRAMS: Final = 1024
"""Enough to keep a GPU's memory and links busy; what there is is divided among them on the device."""


def push_rows(
    rows: torch.Tensor, ends: torch.Tensor, targets: torch.Tensor, firsts: torch.Tensor, addresses: torch.Tensor
) -> None:
    """Write rows to where their `Blocks` go, in memory of which `addresses` has each rank's."""
    num_blocks = ends.shape[0]
    with torch.cuda.device_of(rows):
        _push_rows[(_NUM_PROGRAMS,)](
            rows, ends, targets, firsts, addresses, rows.shape[1],
            num_blocks, triton.next_power_of_2(num_blocks), _columns(rows),
        )  # fmt: skip


def copy_rows(source: torch.Tensor, target: torch.Tensor, count: torch.Tensor) -> None:
    """Copy the first `count` () rows."""
    with torch.cuda.device_of(target):
        _copy_rows[(_NUM_PROGRAMS,)](source, target, count, target.shape[1], _columns(target))


def _columns(rows: torch.Tensor) -> int:
    return min(1024, int(triton.next_power_of_2(rows.shape[1])))
