"""Large products of each expert's rows, whose tiles a Hopper GPU's memory accelerator brings and takes away.

On an H100 in bf16, 64 experts, 131,072 rows, of as many dense operations' speed: 1.00 for (2048, 4096), where torch's
grouped product has 0.93; 0.87 and 0.81 for (1408, 2048), whose last tile is half empty. Of gradients of inputs and
weights torch's product is as fast or faster.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from disttrain.kernels.grouped.triton_products import tile_of_rows

_DEPTH = 64


@triton.jit
def _product(
    x, weight, target, result, ends, in_size, out_size, num_columns, NUM_EXPERTS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's product; x, weight and target are described, result is target's address."""
    program = tl.program_id(0)
    tile = program // (GROUP * num_columns) * GROUP + program % (GROUP * num_columns) % GROUP
    column = program % (GROUP * num_columns) // GROUP
    expert, first, end = tile_of_rows(tile, ends, NUM_EXPERTS, WIDTH, ROWS)
    if expert < NUM_EXPERTS:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for depth in range(0, in_size, DEPTH):
            left = x.load([first, depth])
            right = weight.load([expert, column * COLUMNS, depth]).reshape(COLUMNS, DEPTH)
            total = tl.dot(left, right.T, total)
        value = total.to(result.dtype.element_ty)
        if first + ROWS <= end:
            target.store([first, column * COLUMNS], value)
        else:
            rows, outs = first + tl.arange(0, ROWS), column * COLUMNS + tl.arange(0, COLUMNS)
            addresses = result + rows.to(tl.int64)[:, None] * out_size + outs[None, :]
            tl.store(addresses, value, mask=(rows < end)[:, None] & (outs < out_size)[None, :])


def product_by_tma(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each expert's rows of x (rows, in) times its weight (out, in), in bf16; nothing is written past the last end."""
    count, out_size, in_size = weight.shape
    result = x.new_empty(x.shape[0], out_size)
    # A tile's form, and how many tiles of rows follow each other for the same columns. Wide tiles are fastest, but
    # where half of the last one would be empty.
    rows, columns, group = (256, 128, 1) if 0 < out_size % 256 <= 128 else (128, 256, 8)
    num_columns = triton.cdiv(out_size, columns)
    num_tiles = triton.cdiv(triton.cdiv(x.shape[0], rows) + count, group) * group
    with torch.cuda.device_of(x):
        _product[(num_tiles * num_columns,)](
            TensorDescriptor.from_tensor(x, [rows, _DEPTH]),
            TensorDescriptor.from_tensor(weight, [1, columns, _DEPTH]),
            TensorDescriptor.from_tensor(result, [rows, columns]),
            result, ends, in_size, out_size, num_columns, count, triton.next_power_of_2(count), rows, columns, _DEPTH,
            group, num_warps=8, num_stages=4,
        )  # fmt: skip
    return result
