"""The norms as Triton kernels; what they compute, and of which arguments, is what `norms/reference.py` does.

A program takes whole rows, several at once where they are short. The gradients of the parameters are sums over all
rows: persistent programs each sum over theirs, and what they leave is summed at the end.

RMSNorm reads its rows twice, the second time from the cache: so none of them is kept in registers (86 a thread where it
is, 32 in Inductor's kernel, which reads again), and more programs have their reads under way. LayerNorm needs the mean
before the squares, and keeps its row. To read it again takes 1 % less in rows of 4096 and 2 % more in rows of 8192; to
sum by Welford's rule in one pass takes 6 to 11 % more in rows of up to 8192, 1 to 2 % less in 12288 and 16384, and 14 %
less in 32768.

The sizes are those of sweeps on an H200 in bf16, 134 MB a tensor. Forward, a copy takes 64 to 67 us (126 to 128 with a
residual): RMSNorm 64 to 65 in rows of 512 to 16384 elements and 67 in 32768 (keeping rows: 64 to 68, and 73), and 125
to 130 with a residual (129 to 135); LayerNorm 65 to 67 in rows of 512 to 12288, 72 in 16384 (Inductor's 69) and 87 in
32768 (104). Backward: 0.100 to 0.104 ms, a copy 0.097; with two tiles under way instead of three it takes half as long
again, with twice as many smaller programs up to 7 % more. The sum at the end takes 2 to 3 us.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from disttrain.kernels._torch import traced
from disttrain.kernels.choice import num_programs, shared_bytes

_RMS_ELEMENTS: Final = 4096
_LAYER_ELEMENTS: Final = 2048
"""Of the rows that a program has at once, at least."""

_LARGEST_RMS_BLOCK: Final = 8192
"""Of a row, what RMSNorm without a residual reads at once."""

_BACKWARD_ELEMENTS: Final = 8192
"""The same in backward."""

_BACKWARD_WARPS: Final = 16
"""Of the one program that each multiprocessor has."""

_SCRATCH_BYTES: Final = 16 << 10
"""Of shared memory that sums take, at most; the rest is for tiles that are under way."""


@triton.jit
def _read(x, residual, offsets, is_there, HAS_RESIDUAL: tl.constexpr, CACHED: tl.constexpr):
    """x, or its sum with the residual as it is rounded, in fp32."""
    values = tl.load(x + offsets, mask=is_there, other=0.0, eviction_policy=CACHED).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + offsets, mask=is_there, other=0.0, eviction_policy=CACHED).to(tl.float32)
        values = values.to(x.dtype.element_ty).to(tl.float32)
    return values


@triton.jit
def _rms_forward(
    x,
    residual,
    weight,
    y,
    total,
    statistics,
    num_rows,
    row_size: tl.constexpr,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    # Only where the program begins may be far; within its rows 32 bits will do.
    begin = tl.program_id(0).to(tl.int64) * ROWS * row_size
    offsets = tl.arange(0, ROWS)[:, None] * row_size + tl.arange(0, BLOCK)[None, :]
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.range(0, row_size, BLOCK):
        is_there = is_row[:, None] & (first + tl.arange(0, BLOCK) < row_size)[None, :]
        values = _read(x, residual, begin + first + offsets, is_there, HAS_RESIDUAL, "evict_last")
        if HAS_RESIDUAL:
            tl.store(total + begin + first + offsets, values.to(total.dtype.element_ty), mask=is_there)
        squares += values * values
    scale = tl.rsqrt(tl.sum(squares, 1) / row_size + eps)
    tl.store(statistics + rows, scale, mask=is_row)
    for first in tl.range(0, row_size, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        is_there = is_row[:, None] & (columns < row_size)[None, :]
        values = _read(x, residual, begin + first + offsets, is_there, HAS_RESIDUAL, "evict_first") * scale[:, None]
        if HAS_WEIGHT:
            factors = tl.load(weight + columns, mask=columns < row_size, other=0.0, eviction_policy="evict_last")
            values *= factors.to(tl.float32)[None, :]
        tl.store(y + begin + first + offsets, values.to(y.dtype.element_ty), mask=is_there)


@triton.jit
def _layer_forward(
    x,
    residual,
    weight,
    bias,
    y,
    total,
    statistics,
    num_rows,
    row_size: tl.constexpr,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    columns = tl.arange(0, BLOCK)
    is_column = columns < row_size
    is_there = is_row[:, None] & is_column[None, :]
    begin = tl.program_id(0).to(tl.int64) * ROWS * row_size
    offsets = begin + tl.arange(0, ROWS)[:, None] * row_size + columns[None, :]
    values = _read(x, residual, offsets, is_there, HAS_RESIDUAL, "")
    if HAS_RESIDUAL:
        tl.store(total + offsets, values.to(total.dtype.element_ty), mask=is_there)
    mean = tl.sum(values, 1) / row_size
    values = tl.where(is_there, values - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(values * values, 1) / row_size + eps)
    tl.store(statistics + rows * 2, mean, mask=is_row)
    tl.store(statistics + rows * 2 + 1, scale, mask=is_row)
    values *= scale[:, None]
    if HAS_WEIGHT:
        values *= tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        values += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(y + offsets, values.to(y.dtype.element_ty), mask=is_there)


@triton.jit
def _norm_backward(
    grad,
    grad_total,
    x,
    weight,
    statistics,
    grad_x,
    sums,
    num_rows,
    row_size: tl.constexpr,
    num_parameters,
    IS_CENTERED: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    is_column = columns < row_size
    weight_sums = tl.zeros((BLOCK,), tl.float32)
    factors = weight_sums
    if HAS_WEIGHT:
        factors = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    bias_sums = tl.zeros((BLOCK,), tl.float32)
    offsets = tl.arange(0, ROWS)[:, None] * row_size + columns[None, :]
    for first in tl.range(program * ROWS, num_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        begin = tl.cast(first, tl.int64) * row_size
        is_row = rows < num_rows
        is_there = is_row[:, None] & is_column[None, :]
        values = tl.load(x + begin + offsets, mask=is_there, other=0.0).to(tl.float32)
        wished = tl.load(grad + begin + offsets, mask=is_there, other=0.0).to(tl.float32)
        if IS_CENTERED:
            mean = tl.load(statistics + rows * 2, mask=is_row, other=0.0)
            scale = tl.load(statistics + rows * 2 + 1, mask=is_row, other=0.0)
            values -= mean[:, None]
        else:
            scale = tl.load(statistics + rows, mask=is_row, other=0.0)
        normed = tl.where(is_there, values * scale[:, None], 0.0)
        if HAS_WEIGHT:
            weight_sums += tl.sum(wished * normed, 0)
            if HAS_BIAS:
                bias_sums += tl.sum(wished, 0)
            wished *= factors[None, :]
        result = wished - normed * (tl.sum(normed * wished, 1) / row_size)[:, None]
        if IS_CENTERED:
            result -= (tl.sum(wished, 1) / row_size)[:, None]
        result *= scale[:, None]
        if HAS_TOTAL:
            result += tl.load(grad_total + begin + offsets, mask=is_there, other=0.0).to(tl.float32)
        tl.store(grad_x + begin + offsets, result.to(grad_x.dtype.element_ty), mask=is_there)
    if HAS_WEIGHT:
        begin = sums + program.to(tl.int64) * num_parameters * row_size
        tl.store(begin + columns, weight_sums, mask=is_column)
        if HAS_BIAS:
            tl.store(begin + row_size + columns, bias_sums, mask=is_column)


@triton.jit
def _norm_sums(parts, result, num_parts, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """result (size,) = the sum over `parts` (num_parts, size)."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, num_parts, ROWS):
        rows = first + tl.arange(0, ROWS)
        is_there = (rows < num_parts)[:, None] & (columns < size)[None, :]
        total += tl.load(parts + rows[:, None] * size + columns[None, :], mask=is_there, other=0.0)
    tl.store(result + columns, tl.sum(total, 0).to(result.dtype.element_ty), mask=columns < size)


def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    is_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The norm as in `norms/reference.py`; of 32 bits at most."""
    num_rows, row_size = x.shape
    y = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    statistics = torch.empty((num_rows, 2 if is_centered else 1), dtype=torch.float32, device=x.device)
    has_residual = residual is not None
    block, rows, num_warps = _layer_tile(row_size) if is_centered else _rms_tile(row_size, has_residual)
    sizes: dict[str, Any] = {"ROWS": rows, "BLOCK": block, "num_warps": num_warps}
    terms = (x, x if residual is None else residual, x if weight is None else weight)
    results = (y, total, statistics, num_rows, row_size, eps, has_residual, weight is not None)
    grid = (triton.cdiv(num_rows, rows),)
    with torch.cuda.device_of(x):
        if is_centered:
            traced(_layer_forward)[grid](*terms, x if bias is None else bias, *results, bias is not None, **sizes)
        else:
            traced(_rms_forward)[grid](*terms, *results, **sizes)
    return y, total, statistics


def backward(
    grad: torch.Tensor,
    grad_total: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    statistics: torch.Tensor,
    num_parameters: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients as in `norms/reference.py`."""
    num_rows, row_size = x.shape
    grad_x = torch.empty_like(x)
    block, rows, num_stages = _backward_tile(row_size, x.element_size(), shared_bytes(x.device))
    programs = torch.sym_min(triton.cdiv(num_rows, rows), num_programs(x.device))
    sums = torch.empty((programs, num_parameters, row_size), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        traced(_norm_backward)[(programs,)](
            grad,
            grad if grad_total is None else grad_total,
            x,
            x if weight is None else weight,
            statistics,
            grad_x,
            sums,
            num_rows,
            row_size,
            num_parameters,
            IS_CENTERED=statistics.shape[1] == 2,
            HAS_TOTAL=grad_total is not None,
            HAS_WEIGHT=num_parameters > 0,
            HAS_BIAS=num_parameters > 1,
            ROWS=rows,
            BLOCK=block,
            STAGES=num_stages,
            num_warps=_BACKWARD_WARPS,
        )
        return grad_x, _summed(sums, dtype)


def _summed(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Over the first dim, which is much shorter than torch's own kernel would like."""
    total = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    if total.numel():
        traced(_norm_sums)[(triton.cdiv(total.numel(), 32),)](
            parts, total, parts.shape[0], total.numel(), ROWS=32, COLUMNS=32, num_warps=4
        )
    return total


def _rms_tile(row_size: int, has_residual: bool) -> tuple[int, int, int]:
    """Elements that a row's part is padded to, rows at once, and warps."""
    block = int(triton.next_power_of_2(row_size))
    if not has_residual:
        block = min(block, _LARGEST_RMS_BLOCK)
    rows = max(1, _RMS_ELEMENTS // block)
    # More warps keep pace with a second tensor, and with rows of which less is in the cache.
    is_heavy = has_residual or row_size > 2 * _LARGEST_RMS_BLOCK
    per_warp, most_warps = (256, 32) if is_heavy else (512, 16)
    return block, rows, min(most_warps, max(1, block * rows // per_warp))


def _layer_tile(row_size: int) -> tuple[int, int, int]:
    """Elements of a padded row, rows at once, and warps."""
    block = int(triton.next_power_of_2(row_size))
    rows = max(1, _LAYER_ELEMENTS // block)
    return block, rows, min(16, max(2, block * rows // 2048))


def _backward_tile(row_size: int, element_size: int, memory_bytes: int) -> tuple[int, int, int]:
    """Elements of a padded row, rows at once, and how many tiles are under way: of three tensors and two statistics."""
    block = int(triton.next_power_of_2(row_size))
    rows = max(1, _BACKWARD_ELEMENTS // block)
    tile_bytes = 3 * block * rows * element_size + 2 * rows * torch.float32.itemsize
    staged = (memory_bytes - _SCRATCH_BYTES) // tile_bytes
    # One of them is in registers.
    return block, rows, min(3, 1 + staged)
