"""The loss's statistics and gradient as Triton kernels: logits are read once for each, the gradient written once.

One program takes a row for the statistics, a block of a row for the gradient, and a block of rows to combine what came
of all ranks. What they compute, and of which arguments, is what the functions of the same names in
`cross_entropy/pieces.py` do, which judge them.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from disttrain.kernels.cross_entropy.pieces import LossTerms

_LARGEST_BLOCK: Final = 8192
"""Elements of a row at a time: what a program of 8 warps keeps in registers."""

_ROWS_TO_COMBINE: Final = 128


@triton.jit
def _capped(logits, soft_cap):
    """soft_cap * tanh(logits / soft_cap)"""
    return soft_cap * (2.0 * tl.sigmoid(logits * (2.0 / soft_cap)) - 1.0)


@triton.jit
def _statistics(
    logits,
    target,
    weight,
    statistics,
    row_stride,
    num_rows,
    num_own,
    first_class,
    soft_cap,
    IS_SMOOTHED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * row_stride
    top = -float("inf")
    total = 0.0
    summed = 0.0
    for first in range(0, num_own, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        is_there = columns < num_own
        values = tl.load(begin + columns, mask=is_there, other=-float("inf")).to(tl.float32)
        if HAS_CAP:
            values = tl.where(is_there, _capped(values, soft_cap), -float("inf"))
        new_top = tl.maximum(top, tl.max(values, 0))
        # From infinity nothing may be taken away.
        base = tl.where(tl.abs(new_top) == float("inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(values - base), 0)
        top = new_top
        if IS_SMOOTHED:
            counted = tl.where(is_there, values, 0.0)
            if HAS_WEIGHT:
                counted = counted * tl.load(weight + first_class + columns, mask=is_there, other=0.0)
            summed += tl.sum(counted, 0)
    base = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    tl.store(statistics + row, tl.log(total) + base)
    local_target = tl.load(target + row) - first_class
    is_own = (local_target >= 0) & (local_target < num_own)
    picked = tl.load(begin + local_target, mask=is_own, other=0.0).to(tl.float32)
    if HAS_CAP:
        picked = _capped(picked, soft_cap)
    tl.store(statistics + num_rows + row, picked)
    if IS_SMOOTHED:
        tl.store(statistics + 2 * num_rows + row, summed)


@triton.jit
def _combined(
    of_ranks,
    target,
    weight,
    total_weight,
    loss,
    log_sums,
    num_ranks,
    num_rows,
    num_classes,
    ignore_index,
    smoothing,
    z_loss,
    IS_SMOOTHED: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = rows < num_rows
    rank_stride = (3 if IS_SMOOTHED else 2) * num_rows
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    picked = tl.zeros((BLOCK,), tl.float32)
    summed = tl.zeros((BLOCK,), tl.float32)
    for rank in range(num_ranks):
        begin = of_ranks + rank * rank_stride + rows
        values = tl.load(begin, mask=is_there, other=0.0)
        new_top = tl.maximum(top, values)
        base = tl.where(tl.abs(new_top) == float("inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.exp(values - base)
        top = new_top
        picked += tl.load(begin + num_rows, mask=is_there, other=0.0)
        if IS_SMOOTHED:
            summed += tl.load(begin + 2 * num_rows, mask=is_there, other=0.0)
    log_sum = tl.log(total) + tl.where(tl.abs(top) == float("inf"), 0.0, top)
    classes = tl.load(target + rows, mask=is_there, other=0)
    is_right = (classes >= 0) & (classes < num_classes)
    result = log_sum - picked
    row_weights = 1.0
    if HAS_WEIGHT:
        row_weights = tl.load(weight + classes, mask=is_there & is_right, other=0.0)
        result *= row_weights
    if IS_SMOOTHED:
        spread_out = log_sum * tl.load(total_weight) - summed
        result = result * (1.0 - smoothing) + spread_out * (smoothing / num_classes)
    if HAS_Z:
        result += log_sum * log_sum * z_loss * row_weights
    result = tl.where(is_right, result, float("nan"))
    tl.store(loss + rows, tl.where(classes == ignore_index, 0.0, result), mask=is_there)
    tl.store(log_sums + rows, log_sum, mask=is_there)


@triton.jit
def _gradient(
    logits,
    log_sums,
    target,
    grad_rows,
    weight,
    total_weight,
    grad,
    row_stride,
    grad_rows_stride,
    num_own,
    first_class,
    num_classes,
    ignore_index,
    smoothing,
    z_loss,
    soft_cap,
    IS_SMOOTHED: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < num_own
    values = tl.load(logits + row * row_stride + columns, mask=is_there, other=-float("inf")).to(tl.float32)
    if HAS_CAP:
        values = _capped(values, soft_cap)
    log_sum = tl.load(log_sums + row)
    wanted = tl.load(target + row)
    # Where all rows are ignored, the mean's gradient is infinite.
    scale = tl.where(wanted == ignore_index, 0.0, tl.load(grad_rows + row * grad_rows_stride))
    weighted = scale
    if HAS_WEIGHT:
        weighted *= tl.load(weight + wanted, mask=(wanted >= 0) & (wanted < num_classes), other=0.0)
    at_target = weighted * (1.0 - smoothing)
    spread = at_target
    everywhere = scale * (smoothing / num_classes)
    if IS_SMOOTHED:
        spread += everywhere * tl.load(total_weight)
    if HAS_Z:
        spread += weighted * log_sum * (2.0 * z_loss)
    result = tl.exp(values - log_sum) * spread
    if IS_SMOOTHED:
        if HAS_WEIGHT:
            result -= everywhere * tl.load(weight + first_class + columns, mask=is_there, other=0.0)
        else:
            result -= everywhere
    result = tl.where(columns + first_class == wanted, result - at_target, result)
    if HAS_CAP:
        result *= 1.0 - (values / soft_cap) * (values / soft_cap)
    tl.store(grad + row * num_own + columns, result.to(grad.dtype.element_ty), mask=is_there)


def statistics_of_classes(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, terms: LossTerms
) -> torch.Tensor:
    """Statistics as in `cross_entropy/pieces.py`; logits are of at most 32 bits, and lie row by row, perhaps with gaps
    between."""
    num_rows, num_own = logits.shape
    is_smoothed = terms.label_smoothing > 0
    statistics = torch.empty((2 + is_smoothed, num_rows), dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        _statistics[(num_rows,)](
            logits,
            target,
            statistics if weight is None else weight,
            statistics,
            logits.stride(0),
            num_rows,
            num_own,
            terms.first_class,
            terms.soft_cap,
            IS_SMOOTHED=is_smoothed,
            HAS_CAP=terms.soft_cap > 0,
            HAS_WEIGHT=weight is not None,
            BLOCK=_block(num_own, _LARGEST_BLOCK),
            num_warps=8,
        )
    return statistics


def combined_of_classes(
    of_ranks: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, terms: LossTerms
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combines statistics as in `cross_entropy/pieces.py`; fp32, contiguous."""
    num_ranks, num_statistics, num_rows = of_ranks.shape
    loss, log_sums = torch.empty((2, num_rows), dtype=torch.float32, device=of_ranks.device).unbind()
    with torch.cuda.device_of(of_ranks):
        _combined[(triton.cdiv(num_rows, _ROWS_TO_COMBINE),)](
            of_ranks,
            target,
            loss if weight is None else weight,
            _total_weight(of_ranks, weight, terms),
            loss,
            log_sums,
            num_ranks,
            num_rows,
            terms.num_classes,
            terms.ignore_index,
            terms.label_smoothing,
            terms.z_loss,
            IS_SMOOTHED=num_statistics == 3,
            HAS_Z=terms.z_loss > 0,
            HAS_WEIGHT=weight is not None,
            BLOCK=_ROWS_TO_COMBINE,
            num_warps=4,
        )
    return loss, log_sums


def gradient_of_classes(
    logits: torch.Tensor,
    log_sums: torch.Tensor,
    target: torch.Tensor,
    grad_rows: torch.Tensor,
    weight: torch.Tensor | None,
    terms: LossTerms,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient as in `cross_entropy/pieces.py`; logits as for the statistics, `out` without gaps."""
    num_rows, num_own = logits.shape
    grad = torch.empty((num_rows, num_own), dtype=logits.dtype, device=logits.device) if out is None else out
    block = _block(num_own, _LARGEST_BLOCK // 2)
    with torch.cuda.device_of(logits):
        _gradient[(num_rows, triton.cdiv(num_own, block))](
            logits,
            log_sums,
            target,
            grad_rows,
            log_sums if weight is None else weight,
            _total_weight(log_sums, weight, terms),
            grad,
            logits.stride(0),
            grad_rows.stride(0),
            num_own,
            terms.first_class,
            terms.num_classes,
            terms.ignore_index,
            terms.label_smoothing,
            terms.z_loss,
            terms.soft_cap,
            IS_SMOOTHED=terms.label_smoothing > 0,
            HAS_Z=terms.z_loss > 0,
            HAS_CAP=terms.soft_cap > 0,
            HAS_WEIGHT=weight is not None,
            BLOCK=block,
            num_warps=8,
        )
    return grad


def _total_weight(like: torch.Tensor, weight: torch.Tensor | None, terms: LossTerms) -> torch.Tensor:
    """The weight of all classes, for label smoothing."""
    if not terms.label_smoothing:
        return like
    return like.new_full((), terms.num_classes) if weight is None else weight.sum()


def _block(num_own: int, largest: int) -> int:
    return min(largest, int(triton.next_power_of_2(num_own)))
