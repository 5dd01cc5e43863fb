"""The rotation as a Triton kernel; what it computes, and of which arguments, is what `rotary/reference.py` does.

A program turns some heads at one position, so that the angles are read once for all of them.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from disttrain.kernels._torch import traced

_TILE_ELEMENTS: Final = 2048
"""Pairs that a program of 4 warps has at once, at most."""


@triton.jit
def _turn(
    x,
    cos,
    sin,
    result,
    batch_stride,
    head_stride,
    position_stride,
    result_batch_stride,
    result_head_stride,
    result_position_stride,
    num_heads,
    num_positions,
    num_pairs,
    IS_INTERLEAVED: tl.constexpr,
    IS_BACK: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    position = program % num_positions
    batch = program // num_positions
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    pairs = tl.arange(0, PAIRS)
    is_pair = pairs < num_pairs
    is_there = (heads < num_heads)[:, None] & is_pair[None, :]
    cosines = tl.load(cos + position * num_pairs + pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    sines = tl.load(sin + position * num_pairs + pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    if IS_BACK:
        sines = -sines
    if IS_INTERLEAVED:
        firsts, seconds = 2 * pairs, 2 * pairs + 1
    else:
        firsts, seconds = pairs, num_pairs + pairs
    begin = x + batch * batch_stride + position * position_stride + heads[:, None] * head_stride
    first = tl.load(begin + firsts[None, :], mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(begin + seconds[None, :], mask=is_there, other=0.0).to(tl.float32)
    out = result + batch * result_batch_stride + position * result_position_stride
    out += heads[:, None] * result_head_stride
    dtype = result.dtype.element_ty
    tl.store(out + firsts[None, :], (first * cosines - second * sines).to(dtype), mask=is_there)
    tl.store(out + seconds[None, :], (first * sines + second * cosines).to(dtype), mask=is_there)


def turn(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, result: torch.Tensor, is_interleaved: bool, is_back: bool
) -> None:
    """Rotates as in `rotary/reference.py`; of 32 bits at most."""
    if x.stride(3) != 1:
        turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        turn(x.contiguous(), cos, sin, turned, is_interleaved, is_back)
        result.copy_(turned)
        return
    batch_size, num_heads, num_positions, row_size = x.shape
    pairs = int(triton.next_power_of_2(row_size // 2))
    heads = max(1, min(int(triton.next_power_of_2(num_heads)), _TILE_ELEMENTS // pairs))
    with torch.cuda.device_of(x):
        traced(_turn)[(batch_size * num_positions, triton.cdiv(num_heads, heads))](
            x,
            cos,
            sin,
            result,
            *x.stride()[:3],
            *result.stride()[:3],
            num_heads,
            num_positions,
            row_size // 2,
            IS_INTERLEAVED=is_interleaved,
            IS_BACK=is_back,
            HEADS=heads,
            PAIRS=pairs,
        )
