"""Products by expert in float8: both factors are cast, with a scale for each row, or one for all rows and one for all
experts' weights.

Gradients of weights are products of what was not cast: there rows are summed up, and their number is the device's
alone, while torch's float8 products sum multiples of 16.
"""

from __future__ import annotations

from typing import Final

import torch

from disttrain.kernels._torch import scaled_grouped_mm
from disttrain.kernels.float8.operator import cast, obstacle
from disttrain.kernels.float8.reference import LINE
from disttrain.kernels.grouped import choice, reference

RECIPES: Final = ("", "tensorwise", "rowwise")
_DTYPE: Final = torch.float8_e4m3fn

outer = choice.outer


def product(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, is_transposed: bool, recipe: str
) -> torch.Tensor:
    """As `choice.product`, in float8 where there is a `recipe` and sizes are multiples of 16."""
    if not recipe or x.shape[1] % LINE or weight.shape[1] % LINE or weight.shape[2] % LINE or not x.numel():
        return choice.product(x, weight, ends, is_transposed)
    matrices = weight.transpose(1, 2).contiguous() if is_transposed else weight
    by_rows = recipe == "rowwise"
    if not by_rows:
        # What lies past the last end, and may be anything, must not raise the scale of all.
        is_kept = torch.arange(len(x), device=x.device) < ends[-1]
        x = torch.where(is_kept[:, None], x, 0)
    left, left_scales = _cast(x, by_rows)
    right, right_scales = _cast(matrices.reshape(-1, matrices.shape[2]), by_rows)
    right = right.view(matrices.shape)
    if not x.is_cuda or obstacle(x):
        return _by_reference(left, left_scales, right, right_scales, ends).to(x.dtype)
    scales = left_scales.expand(len(x)).contiguous(), right_scales.expand(matrices.shape[0] * matrices.shape[1])
    result = scaled_grouped_mm(left, scales[0], right, scales[1].reshape(matrices.shape[:2]).contiguous(), ends)
    return result.to(x.dtype)


def _cast(matrix: torch.Tensor, by_rows: bool) -> tuple[torch.Tensor, torch.Tensor]:
    result = cast(matrix.contiguous(), _DTYPE, by_rows=by_rows, wants_columns=False)
    return result.rows, result.row_scales


def _by_reference(
    left: torch.Tensor, left_scales: torch.Tensor, right: torch.Tensor, right_scales: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """The product of what was cast, in fp32."""
    wide = left.float() * left_scales[:, None]
    matrices = right.float().view(-1, right.shape[2]) * right_scales[:, None]
    return reference.product(wide, matrices.view(right.shape), ends, is_transposed=False)
