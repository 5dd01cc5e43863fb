"""The loss's statistics and gradient as Triton kernels: logits are read once for each, the gradient written once.

One program takes a row for the statistics, and a block of a row for the gradient. What they compute, and in which
arguments, is what the functions of the same names in `loss_pieces.py` do, which judge them.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

_LARGEST_BLOCK: Final = 8192
"""Elements of a row at a time: what a program of 8 warps keeps in registers."""


@triton.jit
def _statistics(
    logits,
    own,
    weight,
    found,
    row_stride,
    num_rows,
    num_classes,
    SUMS_UP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * row_stride
    top = -float("inf")
    total = 0.0
    summed = 0.0
    for first in range(0, num_classes, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        is_there = columns < num_classes
        values = tl.load(begin + columns, mask=is_there, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(values, 0))
        # From infinity nothing may be taken away.
        base = tl.where(tl.abs(new_top) == float("inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(values - base), 0)
        top = new_top
        if SUMS_UP:
            counted = tl.where(is_there, values, 0.0)
            if HAS_WEIGHT:
                counted = counted * tl.load(weight + columns, mask=is_there, other=0.0)
            summed += tl.sum(counted, 0)
    base = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    tl.store(found + row, tl.log(total) + base)
    target = tl.load(own + row).to(tl.int64)
    is_own = (target >= 0) & (target < num_classes)
    picked = tl.load(begin + target, mask=is_own, other=0.0).to(tl.float32)
    tl.store(found + num_rows + row, picked)
    if SUMS_UP:
        tl.store(found + 2 * num_rows + row, summed)


@triton.jit
def _gradient(
    logits,
    log_sums,
    own,
    spread,
    at_target,
    everywhere,
    weight,
    grad,
    row_stride,
    num_classes,
    IS_SMOOTHED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < num_classes
    values = tl.load(logits + row * row_stride + columns, mask=is_there, other=-float("inf")).to(tl.float32)
    result = tl.exp(values - tl.load(log_sums + row)) * tl.load(spread + row)
    if IS_SMOOTHED:
        share = tl.load(everywhere + row)
        if HAS_WEIGHT:
            result -= share * tl.load(weight + columns, mask=is_there, other=0.0)
        else:
            result -= share
    is_target = columns == tl.load(own + row)
    result = tl.where(is_target, result - tl.load(at_target + row), result)
    tl.store(grad + row * num_classes + columns, result.to(grad.dtype.element_ty), mask=is_there)


def statistics_of_classes(
    logits: torch.Tensor, own: torch.Tensor, weight: torch.Tensor | None, *, sums_up: bool
) -> torch.Tensor:
    """As in `loss_pieces`; logits are on a GPU, of at most 32 bits, and lie row by row, perhaps with gaps between."""
    num_rows, num_classes = logits.shape
    found = torch.empty((2 + sums_up, num_rows), dtype=torch.float32, device=logits.device)
    _statistics[(num_rows,)](
        logits,
        own,
        weight if weight is not None else found,
        found,
        logits.stride(0),
        num_rows,
        num_classes,
        SUMS_UP=sums_up,
        HAS_WEIGHT=weight is not None,
        BLOCK=_block(num_classes),
        num_warps=8,
    )
    return found


def gradient_of_classes(
    logits: torch.Tensor,
    log_sums: torch.Tensor,
    own: torch.Tensor,
    spread: torch.Tensor,
    at_target: torch.Tensor,
    everywhere: torch.Tensor | None,
    weight: torch.Tensor | None,
) -> torch.Tensor:
    """As in `loss_pieces`; logits as for the statistics."""
    num_rows, num_classes = logits.shape
    grad = torch.empty((num_rows, num_classes), dtype=logits.dtype, device=logits.device)
    block = min(_block(num_classes), _LARGEST_BLOCK // 2)
    _gradient[(num_rows, triton.cdiv(num_classes, block))](
        logits,
        log_sums,
        own,
        spread,
        at_target,
        everywhere if everywhere is not None else spread,
        weight if weight is not None else spread,
        grad,
        logits.stride(0),
        num_classes,
        IS_SMOOTHED=everywhere is not None,
        HAS_WEIGHT=weight is not None,
        BLOCK=block,
        num_warps=8,
    )
    return grad


def _block(num_classes: int) -> int:
    return min(_LARGEST_BLOCK, int(triton.next_power_of_2(num_classes)))
