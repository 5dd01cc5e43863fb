"""Sorting rows by expert and adding them up again as Triton kernels; what they compute is what `reference.py` does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from disttrain.kernels._torch import traced


@triton.jit
def _count(
    experts, counts, num_assignments, num_blocks, NUM_EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """counts (experts + 1, blocks): how many assignments of a block go to each expert; the last line's have none."""
    block = tl.program_id(0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + index, mask=index < num_assignments, other=0)
    expert = tl.where((expert < 0) | (expert >= NUM_EXPERTS), NUM_EXPERTS, expert)
    expert = tl.where(index < num_assignments, expert, NUM_EXPERTS + 1)
    buckets = tl.arange(0, WIDTH)
    total = tl.sum((expert[:, None] == buckets[None, :]).to(tl.int32), 0)
    tl.store(counts + buckets * num_blocks + block, total, mask=buckets <= NUM_EXPERTS)


@triton.jit
def _place(
    experts, counts, totals, order, slots, ends, num_assignments, num_blocks,
    NUM_EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each assignment's row: those of experts before, those of blocks before, those before it in its block."""
    block = tl.program_id(0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    is_there = index < num_assignments
    expert = tl.load(experts + index, mask=is_there, other=0)
    expert = tl.where((expert < 0) | (expert >= NUM_EXPERTS), NUM_EXPERTS, expert)
    expert = tl.where(is_there, expert, NUM_EXPERTS + 1)
    buckets = tl.arange(0, WIDTH)
    is_own = expert[:, None] == buckets[None, :]
    rank = tl.cumsum(is_own.to(tl.int32), 0) - 1
    cell = buckets * num_blocks + block
    is_bucket = buckets <= NUM_EXPERTS
    begin = tl.load(totals + cell, mask=is_bucket, other=0) - tl.load(counts + cell, mask=is_bucket, other=0)
    slot = tl.sum(tl.where(is_own, rank + begin[None, :], 0), 1).to(tl.int64)
    tl.store(slots + index, slot, mask=is_there)
    tl.store(order + slot, index.to(tl.int64), mask=is_there)
    if block == num_blocks - 1:
        tl.store(ends + buckets, tl.load(totals + cell, mask=is_bucket, other=0), mask=buckets < NUM_EXPERTS)


@triton.jit
def _take(
    x, order, ends, scales, rows, row_size, k, NUM_EXPERTS: tl.constexpr, IS_SCALED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    is_kept = row < tl.load(ends + NUM_EXPERTS - 1)
    assignment = tl.load(order + row)
    source = x + (assignment // k) * row_size
    scale = tl.load(scales + assignment).to(tl.float32) if IS_SCALED else 1.0
    for begin in range(0, row_size, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        value = tl.load(source + columns, mask=(columns < row_size) & is_kept, other=0.0)
        if IS_SCALED:
            value = (value.to(tl.float32) * scale).to(rows.dtype.element_ty)
        tl.store(rows + row * row_size + columns, value, mask=columns < row_size)


@triton.jit
def _combine(
    rows, slots, ends, weights, result, row_size, NUM_EXPERTS: tl.constexpr, K: tl.constexpr, IS_WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    last = tl.load(ends + NUM_EXPERTS - 1)
    for begin in range(0, row_size, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for choice in range(K):
            slot = tl.load(slots + token * K + choice)
            is_there = (columns < row_size) & (slot < last)
            value = tl.load(rows + slot * row_size + columns, mask=is_there, other=0.0).to(tl.float32)
            if IS_WEIGHTED:
                value *= tl.load(weights + token * K + choice).to(tl.float32)
            total += value
        tl.store(result + token * row_size + columns, total.to(result.dtype.element_ty), mask=columns < row_size)


@triton.jit
def _products_with(grad, rows, slots, ends, result, row_size, k, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    assignment = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + assignment)
    is_kept = slot < tl.load(ends + NUM_EXPERTS - 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, row_size, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        is_there = (columns < row_size) & is_kept
        value = tl.load(rows + slot * row_size + columns, mask=is_there, other=0.0).to(tl.float32)
        total += value * tl.load(grad + (assignment // k) * row_size + columns, mask=is_there, other=0.0).to(tl.float32)
    tl.store(result + assignment, tl.sum(total, 0))


@triton.jit
def _clear_past(rows, ends, num_rows, row_size, NUM_EXPERTS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0) * LINES
    last = tl.load(ends + NUM_EXPERTS - 1)
    if first + LINES > last:
        for row in range(tl.maximum(first, last), tl.minimum(first + LINES, num_rows)):
            line = rows + tl.cast(row, tl.int64) * row_size
            for begin in range(0, row_size, BLOCK):
                columns = begin + tl.arange(0, BLOCK)
                zeros = tl.zeros((BLOCK,), rows.dtype.element_ty)
                tl.store(line + columns, zeros, mask=columns < row_size)


def sort(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Order, slots and ends as in `reference.py`."""
    width = triton.next_power_of_2(num_experts + 1)
    block = max(16, min(256, (1 << 15) // width))
    num_blocks = triton.cdiv(experts.shape[0], block)
    counts = torch.empty(num_experts + 1, num_blocks, dtype=torch.int32, device=experts.device)
    order, slots = (torch.empty_like(experts) for _ in range(2))
    ends = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    sizes = (experts.shape[0], num_blocks, num_experts, width, block)
    with torch.cuda.device_of(experts):
        traced(_count)[(num_blocks,)](experts, counts, *sizes)
        totals = torch.cumsum(counts.view(-1), 0, dtype=torch.int32)
        traced(_place)[(num_blocks,)](experts, counts, totals, order, slots, ends, *sizes)
    return order, slots, ends


def take(x: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, k: int, scales: torch.Tensor | None) -> torch.Tensor:
    """Rows as in `reference.py`."""
    rows = x.new_empty(order.shape[0], x.shape[1])
    with torch.cuda.device_of(x):
        traced(_take)[(order.shape[0],)](
            x, order, ends, scales, rows, x.shape[1], k, ends.shape[0], scales is not None, _block(x)
        )
    return rows


def combine(
    rows: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor, k: int, weights: torch.Tensor | None
) -> torch.Tensor:
    """Sums as in `reference.py`."""
    result = rows.new_empty(slots.shape[0] // k, rows.shape[1])
    with torch.cuda.device_of(rows):
        traced(_combine)[(result.shape[0],)](
            rows, slots, ends, weights, result, rows.shape[1], ends.shape[0], k, weights is not None, _block(rows)
        )
    return result


def products_with(
    grad: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor, k: int
) -> torch.Tensor:
    """Products as in `reference.py`."""
    result = torch.empty(slots.shape[0], dtype=torch.float32, device=rows.device)
    with torch.cuda.device_of(rows):
        traced(_products_with)[(slots.shape[0],)](
            grad, rows, slots, ends, result, rows.shape[1], k, ends.shape[0], _block(rows)
        )
    return result


def clear_past(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Zeros as in `reference.py`."""
    lines = 64
    with torch.cuda.device_of(rows):
        traced(_clear_past)[(triton.cdiv(rows.shape[0], lines),)](
            rows, ends, *rows.shape, ends.shape[0], lines, _block(rows)
        )
    return rows


def _block(rows: torch.Tensor) -> int:
    return min(1024, int(triton.next_power_of_2(rows.shape[1])))
