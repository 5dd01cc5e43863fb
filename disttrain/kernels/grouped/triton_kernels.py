"""All of Triton's kernels for experts, under the names of `reference.py`."""

from __future__ import annotations

from disttrain.kernels.grouped.triton_products import add_bias, bias_grad, gated, gated_backward, outer, product
from disttrain.kernels.grouped.triton_rows import clear_past, combine, products_with, sort, take
from disttrain.kernels.grouped.triton_tma import product_by_tma

__all__ = [
    "add_bias",
    "bias_grad",
    "clear_past",
    "combine",
    "gated",
    "gated_backward",
    "outer",
    "product",
    "product_by_tma",
    "products_with",
    "sort",
    "take",
]
