"""Casts to float8 as Triton kernels; what they compute, and of which arguments, is what `float8/reference.py` does.

Two passes: the first reads for the largest absolute values, which are kept as the bits of an fp32, whose order as
integers is theirs, NaN above all; the second reads again, and writes both the cast and its transpose.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from disttrain.kernels._torch import traced
from disttrain.kernels.choice import num_programs
from disttrain.kernels.float8.reference import INFINITE, LARGEST_POWER, LINE, ROUNDS_UP, amax_of_parts

_BLOCK: Final = 4096
"""Elements that a program of the first pass has at once."""

_PROGRAMS: Final = 8
"""Of the first pass on each multiprocessor."""

_TILE: Final = (128, 64)
"""Rows and columns of a program of the second pass: 128 rows are 128 bytes in a row of the transpose."""

_WARPS: Final = 8

_ROUNDS_UP: Final = tl.constexpr(ROUNDS_UP)
_INFINITE: Final = tl.constexpr(INFINITE)


@triton.jit
def magnitude(values):
    return values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _amax(x, bits, num_elements, num_programs, BLOCK: tl.constexpr):
    largest = tl.zeros((BLOCK,), tl.int32)
    for begin in range(tl.program_id(0).to(tl.int64) * BLOCK, num_elements, num_programs * BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        values = tl.load(x + offsets, mask=offsets < num_elements, other=0.0)
        largest = tl.maximum(largest, magnitude(values))
    tl.atomic_max(bits, tl.max(largest, 0))


@triton.jit
def _tile(x, in_scales, num_rows, num_columns, rows_per_scale, HAS_SCALES: tl.constexpr, ROWS, COLUMNS):
    """The numbers of its rows and columns, which of them are there, and its values."""
    num_blocks = tl.cdiv(num_columns, COLUMNS)
    rows = (tl.program_id(0) // num_blocks) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % num_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < num_rows, columns < num_columns
    offsets = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    values = tl.load(x + offsets, mask=is_row[:, None] & is_column[None, :], other=0.0).to(tl.float32)
    if HAS_SCALES:
        values *= tl.load(in_scales + rows // rows_per_scale, mask=is_row, other=0.0)[:, None]
    return rows, columns, is_row, is_column, offsets, values


@triton.jit
def _amaxes(
    x,
    in_scales,
    row_bits,
    column_bits,
    num_rows,
    num_columns,
    rows_per_scale,
    HAS_SCALES: tl.constexpr,
    WANTS_ROWS: tl.constexpr,
    WANTS_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows, columns, is_row, is_column, _, values = _tile(
        x, in_scales, num_rows, num_columns, rows_per_scale, HAS_SCALES, ROWS, COLUMNS
    )
    magnitudes = magnitude(values)
    if WANTS_ROWS:
        tl.atomic_max(row_bits + rows, tl.max(magnitudes, 1), mask=is_row)
    if WANTS_COLUMNS:
        tl.atomic_max(column_bits + columns, tl.max(magnitudes, 0), mask=is_column)


@triton.jit
def scale_of(bits, LARGEST: tl.constexpr):
    """A scale, and what to multiply by instead of dividing by it."""
    exponent = tl.maximum(((bits + _ROUNDS_UP) >> 23) - LARGEST, 1)
    scale = tl.where(bits < _INFINITE, exponent << 23, bits).to(tl.float32, bitcast=True)
    return scale, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _cast(
    x,
    in_scales,
    row_bits,
    column_bits,
    by_rows,
    row_scales,
    by_columns,
    column_scales,
    num_rows,
    num_columns,
    column_stride,
    rows_per_scale,
    HAS_SCALES: tl.constexpr,
    WANTS_ROWS: tl.constexpr,
    WANTS_COLUMNS: tl.constexpr,
    HAS_ONE_SCALE: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows, columns, is_row, is_column, offsets, values = _tile(
        x, in_scales, num_rows, num_columns, rows_per_scale, HAS_SCALES, ROWS, COLUMNS
    )
    if WANTS_ROWS:
        if HAS_ONE_SCALE:
            scale, factor = scale_of(tl.load(row_bits), LARGEST)
            if tl.program_id(0) == 0:
                tl.store(row_scales, scale)
            scaled = values * factor
        else:
            scale, factor = scale_of(tl.load(row_bits + rows, mask=is_row, other=0), LARGEST)
            if tl.program_id(0) % tl.cdiv(num_columns, COLUMNS) == 0:
                tl.store(row_scales + rows, scale, mask=is_row)
            scaled = values * factor[:, None]
        mask = is_row[:, None] & is_column[None, :]
        tl.store(by_rows + offsets, scaled.to(by_rows.dtype.element_ty), mask=mask)
    if WANTS_COLUMNS:
        if HAS_ONE_SCALE:
            scale, factor = scale_of(tl.load(column_bits), LARGEST)
            if tl.program_id(0) == 0:
                tl.store(column_scales, scale)
            scaled = values * factor
        else:
            scale, factor = scale_of(tl.load(column_bits + columns, mask=is_column, other=0), LARGEST)
            if tl.program_id(0) < tl.cdiv(num_columns, COLUMNS):
                tl.store(column_scales + columns, scale, mask=is_column)
            scaled = values * factor[None, :]
        turned = tl.trans(scaled.to(by_columns.dtype.element_ty))
        turned_places = columns.to(tl.int64)[:, None] * column_stride + rows[None, :]
        mask = is_column[:, None] & (rows < column_stride)[None, :]
        tl.store(by_columns + turned_places, turned, mask=mask)


def cast(
    x: torch.Tensor,
    in_scales: torch.Tensor | None,
    rows_per_scale: int,
    dtype: torch.dtype,
    by_rows: bool,
    wants_rows: bool,
    wants_columns: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Casts as in `float8/reference.py`; of 32 bits at most."""
    num_rows, num_columns = x.shape
    padded = triton.cdiv(num_rows, LINE) * LINE
    num_row_scales, num_column_scales = (num_rows, num_columns) if by_rows else (1, 1)
    rows = x.new_empty((num_rows, num_columns) if wants_rows else 0, dtype=dtype)
    columns = x.new_empty((num_columns, padded) if wants_columns else 0, dtype=dtype)
    row_scales = x.new_empty(num_row_scales if wants_rows else 0, dtype=torch.float32)
    column_scales = x.new_empty(num_column_scales if wants_columns else 0, dtype=torch.float32)
    tile_rows, tile_columns = _TILE
    grid = (triton.cdiv(padded, tile_rows) * triton.cdiv(num_columns, tile_columns),)
    tiling = {"ROWS": tile_rows, "COLUMNS": tile_columns, "num_warps": _WARPS}
    wants = {"HAS_SCALES": in_scales is not None, "WANTS_ROWS": wants_rows, "WANTS_COLUMNS": wants_columns}
    with torch.cuda.device_of(x):
        if by_rows:
            # Of their own, and not parts of one: a graph takes what a kernel writes to for another tensor.
            row_bits = torch.zeros(num_rows, dtype=torch.int32, device=x.device)
            column_bits = torch.zeros(num_columns, dtype=torch.int32, device=x.device)
            traced(_amaxes)[grid](
                x, in_scales, row_bits, column_bits, num_rows, num_columns, rows_per_scale, **wants, **tiling
            )
        elif in_scales is None:
            row_bits = column_bits = torch.zeros(1, dtype=torch.int32, device=x.device)
            size = torch.sym_min(_PROGRAMS * num_programs(x.device), triton.cdiv(x.numel(), _BLOCK))
            traced(_amax)[(size,)](x, row_bits, x.numel(), size, BLOCK=_BLOCK, num_warps=8)
        else:
            row_bits = column_bits = amax_of_parts(in_scales, x.dtype).view(torch.int32)
        traced(_cast)[grid](
            x,
            in_scales,
            row_bits,
            column_bits,
            rows,
            row_scales,
            columns,
            column_scales,
            num_rows,
            num_columns,
            padded,
            rows_per_scale,
            HAS_ONE_SCALE=not by_rows,
            LARGEST=LARGEST_POWER[dtype],
            **wants,
            **tiling,
        )
    return rows, row_scales, columns, column_scales
