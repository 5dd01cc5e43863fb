"""Triton's `Kernels` for experts."""

from __future__ import annotations

from disttrain.kernels.grouped.triton_products import add_bias, bias_grad, gated, gated_backward, outer, product
from disttrain.kernels.grouped.triton_rows import clear_past, combine, products_with, sort, take

__all__ = [
    "add_bias",
    "bias_grad",
    "clear_past",
    "combine",
    "gated",
    "gated_backward",
    "outer",
    "product",
    "products_with",
    "sort",
    "take",
]
