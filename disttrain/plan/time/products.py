"""Estimates the time of a matrix product by its shape.

A product is computed in tiles, each by one multiprocessor, as many at a time as there are: a last round of few tiles
takes as long as a full one, and smaller tiles, of which more fit, read more for each result. Of some tile sizes the
best one for a shape is taken, as cuBLAS does. Source: NVIDIA, "Matrix Multiplication Background User's Guide", on tile
and wave quantization. What the hardware attains is said for the product that `--measure` runs.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from disttrain.plan.time.hardware import Hardware

MEASURED: Final = 8192
"""Rows and columns of the product whose rate a `Hardware` has."""
_TILES: Final = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (64, 128, 0.85), (64, 64, 0.7))
"""Rows, columns, and the rate in rounds that are full: that of the largest is 1."""
ROWS_LOST: Final = 246
"""With which each group of a grouped product takes as long as it does: so H100 has measured our kernels beside one
product of as many FLOPs, within 0.05 of its rate for 256 to 4096 rows of a group
(`benchmarks/results/experts_gpu.json`)."""


def product_s(hardware: Hardware, flops_per_s: float, rows: float, columns: float, inner: float) -> float:
    """Of a matrix of `rows` x `inner` and one of `inner` x `columns`; `flops_per_s` of a large one."""
    share = _filled(hardware.num_multiprocessors, round(rows), round(columns))
    large = _filled(hardware.num_multiprocessors, MEASURED, MEASURED)
    return 2 * rows * columns * inner / flops_per_s * max(1.0, large / share)


@cache
def _filled(num_multiprocessors: int, rows: int, columns: int, num_products: int = 1) -> float:
    """The share of the best rate that products of this shape attain."""
    best = 0.0
    for tile_rows, tile_columns, rate in _TILES:
        num_tiles = num_products * -(-rows // tile_rows) * -(-columns // tile_columns)
        rounds = -(-num_tiles // num_multiprocessors)
        needed = num_products * rows * columns / (tile_rows * tile_columns)
        best = max(best, rate * needed / (rounds * num_multiprocessors))
    return best


def grouped_product_s(
    hardware: Hardware,
    flops_per_s: float,
    num_groups: int,
    shape: tuple[float, float, float],
    group_rows: float,
    itemsize: int,
) -> float:
    """Of as many products of one shape, in one launch, each of matrices of its own.

    Tiles of all of them share the multiprocessors. `group_rows` are the rows that each has of its own, also where they
    are summed over: each product begins anew with them, which costs as much as some more. With few rows the matrices
    take longer to be read than to be multiplied.
    """
    rows, columns, inner = shape
    share = _filled(hardware.num_multiprocessors, round(max(1.0, rows)), round(columns), num_groups)
    large = _filled(hardware.num_multiprocessors, MEASURED, MEASURED)
    flops = 2 * num_groups * rows * columns * inner
    moved = itemsize * num_groups * (rows * inner + inner * columns + rows * columns)
    computing_s = flops / flops_per_s * max(1.0, large / share) * (1 + ROWS_LOST / group_rows)
    return max(computing_s, moved / hardware.memory_bytes_per_s)
