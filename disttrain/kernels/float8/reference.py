"""Casts to float8 and their product by torch's operators, for CPUs and GPUs without float8; they judge the kernels."""

from __future__ import annotations

from typing import Final

import torch

LARGEST_POWER: Final = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
"""The largest value of a format is 1.75 times two to this power."""

ROUNDS_UP: Final = 0x1FFFFF
"""Added to the bits of an fp32, it carries into the exponent where the mantissa is above 1.75."""

INFINITE: Final = 0x7F800000
"""The bits of an infinite fp32; those of a NaN are above it."""

LINE: Final = 16
"""Products of float8 want what they sum over, and rows of both operands, in multiples of so many."""


def scale_of(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The smallest power of two whose product with the format's largest value is not below `amax`, fp32, element by
    element; of what is not finite, that itself."""
    bits = amax.view(torch.int32)
    exponent = ((bits + ROUNDS_UP) >> 23) - LARGEST_POWER[dtype]
    scale = (exponent.clamp(min=1) << 23).view(torch.float32)
    return torch.where(bits < INFINITE, scale, amax)


def cast(
    x: torch.Tensor,
    in_scales: torch.Tensor | None,
    rows_per_scale: int,
    dtype: torch.dtype,
    by_rows: bool,
    wants_rows: bool,
    wants_columns: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`x` in float8, as it is and transposed, each with its scales; what is not wanted is empty.

    Args:    x  (R, C), contiguous;  in_scales  of groups of `rows_per_scale` rows of x, which are multiplied by them;
             by_rows  one scale for each row of a result, else one for all.
    Returns: (R, C) and its scales, (R,) or (1,); (C, R rounded up to a multiple of LINE, with zeros) and its scales.
    """
    wide = x.float()
    amax = None
    if in_scales is not None:
        wide = wide * in_scales.repeat_interleave(rows_per_scale)[: len(x), None]
        if not by_rows:
            amax = amax_of_parts(in_scales, x.dtype)
    rows = columns = x.new_empty(0, dtype=dtype)
    row_scales = column_scales = x.new_empty(0, dtype=torch.float32)
    if amax is None and not by_rows:
        amax = _amax(wide.reshape(1, -1))
    if wants_rows:
        row_scales = scale_of(_amax(wide) if by_rows or amax is None else amax, dtype)
        rows = (wide / row_scales[:, None]).to(dtype)
    if wants_columns:
        turned = wide.t().contiguous()
        column_scales = scale_of(_amax(turned) if by_rows or amax is None else amax, dtype)
        columns = torch.nn.functional.pad(turned / column_scales[:, None], (0, -len(x) % LINE)).to(dtype)
    return rows, row_scales, columns, column_scales


def amax_of_parts(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The largest value that parts with these scales can have, (1,): its scale is the largest of theirs."""
    return scales.max().view(1) * float(2 ** LARGEST_POWER[dtype])


def multiply(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, dtype: torch.dtype, is_fast: bool
) -> torch.Tensor:
    """a times b transposed, with the scales of their rows, summed in fp32 and rounded once.

    Args: a  (M, K);  b  (N, K);  scales  (1,), or (M,) and (N,);  is_fast  ignored here.
    Returns: (M, N) of `dtype`.
    """
    # Every value of float8 is one of bf16, which GPUs multiply without rounding.
    factor_dtype = torch.bfloat16 if a.is_cuda and dtype == torch.bfloat16 else torch.float32
    product = (a.to(factor_dtype) @ b.to(factor_dtype).t()).float()
    return (product * a_scales[:, None] * b_scales).to(dtype)


def _amax(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each row."""
    return x.abs().amax(1) if x.numel() else x.new_zeros(len(x))
