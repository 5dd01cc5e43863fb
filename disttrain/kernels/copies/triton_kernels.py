"""Copies of many tensors in one Triton launch; what it computes is what `copies/reference.py` does.

A launch finds its tensors by their addresses, in a table. A program takes a block of one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl

from disttrain.kernels.launch_table import DTYPES, are_aligned, at, blocks_of, table_of

_BLOCK: Final = 1024
_NUM_WARPS: Final = 2
"""By a sweep on an H200 over a block's gradients, 218 million elements, bf16 to fp32: 2048 elements by 4 warps take 1
% longer. Inductor's kernels, one a tensor and so without a table, take 318 us, this one 322, and a plain copy of as
many bytes 95 % of that."""


@triton.jit
def _copy(
    table,
    tensors,
    blocks,
    sizes,
    scale,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor = tl.load(tensors + tl.program_id(0))
    size = tl.load(sizes + tensor)
    if IS_ALIGNED:
        size = tl.multiple_of(size, 16)
    offsets = tl.load(blocks + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = offsets < size
    values = tl.load(at(table + tensor * 2, SOURCE, IS_ALIGNED) + offsets, mask=is_there)
    if HAS_SCALE:
        values = values.to(tl.float32) * tl.load(scale).to(tl.float32)
    tl.store(at(table + tensor * 2 + 1, TARGET, IS_ALIGNED) + offsets, values.to(TARGET), mask=is_there)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], scale: torch.Tensor | None) -> None:
    """Copies as in `copies/reference.py`; of 32 bits at most, contiguous, and all of a side of one dtype."""
    device = targets[0].device
    tensors, blocks, sizes = blocks_of(tuple(target.numel() for target in targets), _BLOCK, device)
    rows = [(source.data_ptr(), target.data_ptr()) for target, source in zip(targets, sources, strict=True)]
    table: Any = table_of(rows, device)
    with torch.cuda.device_of(targets[0]):
        _copy[(tensors.shape[0],)](
            table,
            tensors,
            blocks,
            sizes,
            table if scale is None else scale,
            SOURCE=DTYPES[sources[0].dtype],
            TARGET=DTYPES[targets[0].dtype],
            HAS_SCALE=scale is not None,
            IS_ALIGNED=are_aligned(targets, rows),
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
