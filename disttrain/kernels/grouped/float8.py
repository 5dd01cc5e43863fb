"""Products by expert in float8: both factors are cast, with a scale for each row, or for each expert's rows and weight.

Gradients of weights are products of what was not cast: there rows are summed up, and their number is the device's
alone, while torch's float8 products sum multiples of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from disttrain.kernels._torch import scaled_grouped_mm
from disttrain.kernels.float8.operator import cast, obstacle
from disttrain.kernels.float8.reference import LINE, scale_of
from disttrain.kernels.grouped import choice, reference
from disttrain.kernels.grouped.table import Kernels

RECIPES: Final = ("", "tensorwise", "rowwise")
_DTYPE: Final = torch.float8_e4m3fn


def product_by(recipe: str) -> Callable[..., torch.Tensor]:
    """`choice.product`, or the same in float8 where there is a `recipe`."""
    return partial(_product, recipe) if recipe else choice.product


def _product(
    recipe: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    is_transposed: bool,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """As `choice.product`, in float8 where sizes are multiples of 16."""
    if x.shape[1] % LINE or weight.shape[1] % LINE or weight.shape[2] % LINE or not x.numel():
        return choice.product(x, weight, ends, is_transposed, kernels)
    matrices = weight.transpose(1, 2).contiguous() if is_transposed else weight
    count, out_size, _ = matrices.shape
    if recipe == "rowwise":
        left, left_scales = _cast(x)
        right, right_scales = _cast(matrices.reshape(count * out_size, -1))
    else:
        left, left_scales = _cast_by_expert(x, ends)
        right, right_scales = _cast(matrices.reshape(count, -1))
        right_scales = right_scales[:, None].expand(-1, out_size).reshape(-1)
    right = right.view(matrices.shape)
    if not x.is_cuda or obstacle(x):
        return _by_reference(left, left_scales, right, right_scales, ends).to(x.dtype)
    return scaled_grouped_mm(left, left_scales, right, right_scales.view(count, out_size), ends).to(x.dtype)


def _cast(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    result = cast(matrix.contiguous(), _DTYPE, by_rows=True, wants_columns=False)
    return result.rows, result.row_scales


def _cast_by_expert(x: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in float8 and each one's scale, which all of an expert's rows have."""
    # Those past the last end have one of their own: they may be anything.
    experts = torch.searchsorted(ends, torch.arange(len(x), device=x.device, dtype=ends.dtype), right=True)
    largest = torch.linalg.vector_norm(x, torch.inf, dim=1).float()
    of_experts = largest.new_zeros(len(ends) + 1).scatter_reduce_(0, experts, largest, "amax")
    scales = scale_of(of_experts, _DTYPE)[experts]
    # Powers of two, by which bf16 is multiplied without rounding.
    factors = scales.reciprocal().to(x.dtype if x.dtype == torch.bfloat16 else torch.float32)
    return (x * factors[:, None]).to(_DTYPE), scales


def _by_reference(
    left: torch.Tensor, left_scales: torch.Tensor, right: torch.Tensor, right_scales: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """The product of what was cast, in fp32."""
    wide = left.float() * left_scales[:, None]
    matrices = right.float().view(-1, right.shape[2]) * right_scales[:, None]
    return reference.product(wide, matrices.view(right.shape), ends, is_transposed=False)
