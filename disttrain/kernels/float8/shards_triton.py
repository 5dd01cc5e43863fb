"""Casts of many shards as Triton kernels: one launch reads for the largest absolute values, one casts.

Programs of one axis of a grid are a shard's, those of the other axis are the shards. Each program of the first launch
leaves the largest value that it has seen, and each of the second reads those of its shard: nothing has to be zero
before. Scales of rows take one launch, of which a program has a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl

from disttrain.kernels.float8.reference import LARGEST_POWER
from disttrain.kernels.float8.shards_reference import Shard
from disttrain.kernels.float8.triton_kernels import magnitude, scale_of
from disttrain.kernels.launch_table import DTYPES, are_aligned, at, kept_table

_BLOCK: Final = 4096
_ROW_BLOCK: Final = 1024
_PROGRAMS: Final = 256
"""Of the first launch for each shard; one on an idle GPU reads as fast as its memory."""

_NUMBERS: Final = tl.constexpr(6)
"""Of each shard in the table: its address, rows, columns, rows with padding, and where its codes and scales go."""


@triton.jit
def _amaxes(table, largest, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    entry = table + tl.program_id(1) * _NUMBERS
    size = tl.load(entry + 1) * tl.load(entry + 2)
    if IS_ALIGNED:
        size = tl.multiple_of(size, 16)
    x = at(entry, DTYPE, IS_ALIGNED)
    magnitudes = tl.zeros((BLOCK,), tl.int32)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    while begin < size:
        offsets = begin + tl.arange(0, BLOCK)
        values = tl.load(x + offsets, mask=offsets < size, other=0.0)
        magnitudes = tl.maximum(magnitudes, magnitude(values))
        begin += PROGRAMS * BLOCK
    tl.store(largest + tl.program_id(1) * PROGRAMS + tl.program_id(0), tl.max(magnitudes, 0))


@triton.jit
def _cast(
    table,
    largest,
    codes,
    scales,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    entry = table + tl.program_id(1) * _NUMBERS
    num_columns = tl.load(entry + 2)
    size, padded = tl.load(entry + 1) * num_columns, tl.load(entry + 3) * num_columns
    codes_start = tl.load(entry + 4)
    if IS_ALIGNED:
        size, padded = tl.multiple_of(size, 16), tl.multiple_of(padded, 16)
        codes_start = tl.multiple_of(codes_start, 16)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    if (begin < padded) | (begin == 0):
        bits = tl.max(tl.load(largest + tl.program_id(1) * PROGRAMS + tl.arange(0, PROGRAMS)), 0)
        scale, factor = scale_of(bits, LARGEST)
        if begin == 0:
            tl.store(scales + tl.load(entry + 5), scale)
        offsets = begin + tl.arange(0, BLOCK)
        values = tl.load(at(entry, DTYPE, IS_ALIGNED) + offsets, mask=offsets < size, other=0.0).to(tl.float32)
        tl.store(codes + codes_start + offsets, (values * factor).to(codes.dtype.element_ty), mask=offsets < padded)


@triton.jit
def _cast_rows(
    table,
    codes,
    scales,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = table + tl.program_id(1) * _NUMBERS
    num_rows, num_columns, codes_start = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 4)
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(entry + 3):
        if IS_ALIGNED:
            num_columns, codes_start = tl.multiple_of(num_columns, 16), tl.multiple_of(codes_start, 16)
        end = tl.where(row < num_rows, num_columns, 0)
        x = at(entry, DTYPE, IS_ALIGNED) + row * num_columns
        magnitudes = tl.zeros((BLOCK,), tl.int32)
        begin = row * 0
        while begin < end:
            offsets = begin + tl.arange(0, BLOCK)
            magnitudes = tl.maximum(magnitudes, magnitude(tl.load(x + offsets, mask=offsets < end, other=0.0)))
            begin += BLOCK
        scale, factor = scale_of(tl.max(magnitudes, 0), LARGEST)
        tl.store(scales + tl.load(entry + 5) + row, tl.where(row < num_rows, scale, 1.0))
        target = codes + codes_start + row * num_columns
        begin = row * 0
        while begin < num_columns:
            offsets = begin + tl.arange(0, BLOCK)
            values = tl.load(x + offsets, mask=offsets < end, other=0.0).to(tl.float32)
            tl.store(target + offsets, (values * factor).to(codes.dtype.element_ty), mask=offsets < num_columns)
            begin += BLOCK


def cast_shards(shards: Sequence[Shard], sent: torch.Tensor, dtype: torch.dtype, by_rows: bool) -> None:
    """As in `shards.py`; of 32 bits at most."""
    num_shards = len(shards)
    first = shards[0].values
    entries = tuple(
        (x.data_ptr(), *x.shape, num_rows, codes_start, scales_start // 4)
        for x, num_rows, codes_start, scales_start in shards
    )
    addresses = [(entry[0], entry[2], entry[4]) for entry in entries]
    sizes = {
        "DTYPE": DTYPES[first.dtype],
        "IS_ALIGNED": are_aligned([x for x, *_ in shards], addresses),
        "num_warps": 8 if not by_rows else 4,
    }
    table = kept_table(entries, sent.device)
    codes, scales = sent.view(dtype), sent.view(torch.float32)
    power = LARGEST_POWER[dtype]
    with torch.cuda.device_of(sent):
        if by_rows:
            grid = (max(num_rows for _, num_rows, *_ in shards), num_shards)
            if grid[0]:
                _cast_rows[grid](table, codes, scales, LARGEST=power, BLOCK=_ROW_BLOCK, **sizes)
            return
        largest = torch.empty((num_shards, _PROGRAMS), dtype=torch.int32, device=sent.device)
        _amaxes[_PROGRAMS, num_shards](table, largest, BLOCK=_BLOCK, PROGRAMS=_PROGRAMS, **sizes)
        most = max(num_rows * x.shape[1] for x, num_rows, *_ in shards)
        grid = (max(triton.cdiv(most, _BLOCK), 1), num_shards)
        _cast[grid](table, largest, codes, scales, LARGEST=power, BLOCK=_BLOCK, PROGRAMS=_PROGRAMS, **sizes)
