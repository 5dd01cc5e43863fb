"""Joins two results of attention by a Triton kernel, which reads and writes each element once."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

_BLOCK: Final = 4096
"""Elements of a program of 4 warps."""


@triton.jit
def _join(
    out,
    lse,
    other_out,
    other_lse,
    joined_lse,
    num_heads,
    num_rows,
    width,
    out_strides_0,
    out_strides_1,
    out_strides_2,
    lse_strides_0,
    lse_strides_1,
    other_strides_0,
    other_strides_1,
    other_strides_2,
    other_lse_strides_0,
    other_lse_strides_1,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    sequence = (tl.program_id(1) // num_heads).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    is_row = rows < num_rows
    is_there = is_row[:, None] & (columns < width)[None, :]
    lse += sequence * lse_strides_0 + head * lse_strides_1
    other_lse += sequence * other_lse_strides_0 + head * other_lse_strides_1
    this = tl.load(lse + rows, mask=is_row, other=float("-inf"))
    other = tl.load(other_lse + rows, mask=is_row, other=float("-inf")).to(tl.float32)
    most = tl.maximum(this, other)
    # Where neither has seen anything both differences would be nan.
    level = tl.where(most == float("-inf"), 0.0, most)
    of_own, of_other = tl.exp(this - level), tl.exp(other - level)
    total = of_own + of_other
    weight = tl.where(total > 0.0, of_other / tl.where(total > 0.0, total, 1.0), 0.0)
    joined = tl.where(total > 0.0, level + tl.log(total), float("-inf"))
    # Not in place: several threads of a program read the sum of a row, each when it comes to it.
    tl.store(joined_lse + tl.program_id(1).to(tl.int64) * num_rows + rows, joined, mask=is_row)
    places = out + sequence * out_strides_0 + head * out_strides_1 + rows[:, None] * out_strides_2 + columns[None, :]
    others = (
        other_out
        + sequence * other_strides_0
        + head * other_strides_1
        + rows[:, None] * other_strides_2
        + columns[None, :]
    )
    so_far = tl.load(places, mask=is_there, other=0.0)
    coming = tl.load(others, mask=is_there, other=0.0).to(tl.float32)
    tl.store(places, so_far + weight[:, None] * (coming - so_far), mask=is_there)


def join(out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor) -> None:
    """As `sums/reference.py`, in 32 bits."""
    batch_size, num_heads, num_rows, width = out.shape
    other_out = other_out if other_out.stride(3) == 1 else other_out.contiguous()
    other_lse = other_lse if other_lse.stride(2) == 1 else other_lse.contiguous()
    padded = triton.next_power_of_2(width)
    rows = max(1, _BLOCK // padded)
    joined_lse = lse.new_empty(lse.shape)
    _join[(triton.cdiv(num_rows, rows), batch_size * num_heads)](
        out,
        lse,
        other_out,
        other_lse,
        joined_lse,
        num_heads,
        num_rows,
        width,
        *out.stride()[:3],
        *lse.stride()[:2],
        *other_out.stride()[:3],
        *other_lse.stride()[:2],
        ROWS=rows,
        WIDTH=padded,
    )
    lse.copy_(joined_lse)
