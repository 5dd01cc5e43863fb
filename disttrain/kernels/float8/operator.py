"""Matrices in float8, with scales that are powers of two, and their product: an operator each.

Such a scale does not change the values' precision. So all implementations of a cast agree, dividing and multiplying by
a scale does not round, and parts with different scales can be brought to one.

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

import torch

from disttrain.kernels._torch import scaled_mm
from disttrain.kernels.choice import choose
from disttrain.kernels.float8 import reference as float8_reference
from disttrain.kernels.float8.reference import LINE
from disttrain.kernels.operators import define
from disttrain.settings import KERNELS

_CAPABILITY: Final = (8, 9)
"""Of the first GPUs that multiply float8."""


class Cast(NamedTuple):
    """A matrix (R, C) in float8, `rows`, and its transpose `columns`, (C, R rounded up to a multiple of 16)."""

    rows: torch.Tensor
    row_scales: torch.Tensor
    columns: torch.Tensor
    column_scales: torch.Tensor


def cast(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    by_rows: bool,
    wants_rows: bool = True,
    wants_columns: bool = True,
    in_scales: torch.Tensor | None = None,
    rows_per_scale: int = 1,
) -> Cast:
    """`x` (R, C) in float8; see `float8_reference.cast`."""
    results = torch.ops.disttrain.float8_cast(x, in_scales, rows_per_scale, dtype, by_rows, wants_rows, wants_columns)
    return Cast(*results)


def multiply(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    dtype: torch.dtype,
    *,
    is_fast: bool = False,
) -> torch.Tensor:
    """a (M, K) times b (N, K) transposed, (M, N) of `dtype`; `is_fast` sums up in fewer bits."""
    return torch.ops.disttrain.float8_mm(a, a_scales, b, b_scales, dtype, is_fast)  # type: ignore[no-any-return]


def _load() -> Any:
    # Triton is not on every machine, and slow to load.
    from disttrain.kernels.float8 import triton_kernels as float8_triton

    return float8_triton


def _cast(
    x: torch.Tensor,
    in_scales: torch.Tensor | None,
    rows_per_scale: int,
    dtype: torch.dtype,
    by_rows: bool,
    wants_rows: bool,
    wants_columns: bool,
) -> tuple[torch.Tensor, ...]:
    # Of what is float8 already, the scales say where it lies.
    told_by = x if in_scales is None or not x.numel() else in_scales
    kernels = choose("float8_cast", told_by, obstacle(told_by), float8_reference, _load)
    results: tuple[torch.Tensor, ...] = kernels.cast(
        x.contiguous(), in_scales, rows_per_scale, dtype, by_rows, wants_rows, wants_columns
    )
    return results


def _cast_shapes(
    x: torch.Tensor,
    in_scales: torch.Tensor | None,
    rows_per_scale: int,
    dtype: torch.dtype,
    by_rows: bool,
    wants_rows: bool,
    wants_columns: bool,
) -> tuple[torch.Tensor, ...]:
    num_rows, num_columns = x.shape
    padded = (num_rows + LINE - 1) // LINE * LINE
    shapes = ((num_rows, num_columns), num_rows if by_rows else 1) if wants_rows else (0, 0)
    turned = ((num_columns, padded), num_columns if by_rows else 1) if wants_columns else (0, 0)
    return tuple(
        x.new_empty(shape, dtype=kind)
        for shape, kind in zip((*shapes, *turned), (dtype, torch.float32) * 2, strict=True)
    )


def _multiply(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, dtype: torch.dtype, is_fast: bool
) -> torch.Tensor:
    if not a.is_cuda or KERNELS.read() == "reference" or obstacle(a) or not a.numel() or not b.numel():
        return float8_reference.multiply(a, a_scales, b, b_scales, dtype, is_fast)
    return scaled_mm(a, a_scales, b, b_scales, dtype, is_fast)


def obstacle(tensor: torch.Tensor) -> str:
    """Why kernels can't serve on the tensor's device, a whole sentence; empty where they can."""
    return _obstacle_on(tensor.device) if tensor.is_cuda else ""


@cache
def _obstacle_on(device: torch.device) -> str:
    capability = torch.cuda.get_device_capability(device)
    if torch.version.cuda and capability < _CAPABILITY:
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}, and float8 comes with 8.9."
    return ""


# Autograd knows nothing of these: who calls them is a Function of its own, which refuses second derivatives.
define(
    "float8_cast(Tensor x, Tensor? in_scales, int rows_per_scale, ScalarType dtype, bool by_rows, bool wants_rows, "
    "bool wants_columns) -> (Tensor, Tensor, Tensor, Tensor)",
    _cast,
    _cast_shapes,
    is_traceable=True,
    is_once=True,
)
define(
    "float8_mm(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, ScalarType dtype, bool is_fast) -> Tensor",
    _multiply,
    lambda a, a_scales, b, b_scales, dtype, is_fast: a.new_empty((a.shape[0], b.shape[0]), dtype=dtype),
    is_traceable=True,
)
