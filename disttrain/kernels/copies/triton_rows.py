"""Rows of a matrix and pieces of many tensors, copied to each other in one launch, as `copies/reference.py` does.

A program takes a block of one tensor's piece in one row. Where pieces lie is known by tables on the device, which stay
there as far as they may: addresses are counted from the first tensor's, so that tensors which lie to each other as they
did have the same table again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import torch
import triton
import triton.language as tl

from disttrain.kernels.launch_table import DTYPES, Constants, blocks_of, table_of

_BLOCK: Final = 1024
_NUM_WARPS: Final = 2
_OF_BYTES: Final = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
"""What is copied as it is."""


@triton.jit
def _in_sixteens(number):
    """The number, of which the compiler sees that it is a multiple. A hint would hold for the other branch too."""
    return (number >> 4) * 16


@triton.jit
def _pointer(address, DTYPE: tl.constexpr):
    return tl.multiple_of(_in_sixteens(address).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _copy_block(matrix, tensor, row, start, size, num_columns, numel, block, PACKS: tl.constexpr, BLOCK: tl.constexpr):
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    is_there = offsets < size
    in_tensor, in_matrix = row * size + offsets, row * num_columns + start + offsets
    if PACKS:
        values = tl.load(tensor + in_tensor, mask=is_there & (in_tensor < numel), other=0)
        tl.store(matrix + in_matrix, values.to(matrix.dtype.element_ty), mask=is_there)
    else:
        values = tl.load(matrix + in_matrix, mask=is_there)
        tl.store(tensor + in_tensor, values.to(tensor.dtype.element_ty), mask=is_there)


@triton.jit
def _copy_rows(
    matrix,
    first,
    table,
    addresses,
    tensors,
    blocks,
    num_columns,
    MATRIX: tl.constexpr,
    TENSOR: tl.constexpr,
    PACKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.load(tensors + tl.program_id(0))
    size, start, numel = (tl.load(table + number * 3), tl.load(table + number * 3 + 1), tl.load(table + number * 3 + 2))
    block, row = tl.load(blocks + tl.program_id(0)).to(tl.int64), tl.program_id(1).to(tl.int64)
    address = first.to(tl.int64) + tl.load(addresses + number)
    num_columns = num_columns.to(tl.int64)
    begin = matrix.to(tl.int64)
    # Threads read and write many bytes at once where they may.
    if ((size | start | numel | num_columns | address | begin) & 15) == 0:
        _copy_block(
            _pointer(begin, MATRIX),
            _pointer(address, TENSOR),
            row,
            _in_sixteens(start),
            _in_sixteens(size),
            _in_sixteens(num_columns),
            _in_sixteens(numel),
            block,
            PACKS,
            BLOCK,
        )
    else:
        _copy_block(
            begin.to(tl.pointer_type(MATRIX)),
            address.to(tl.pointer_type(TENSOR)),
            row,
            start,
            size,
            num_columns,
            numel,
            block,
            PACKS,
            BLOCK,
        )


def pack_rows(tensors: Sequence[torch.Tensor], sizes: Sequence[int], matrix: torch.Tensor) -> None:
    """As in `copies/reference.py`; contiguous tensors of one dtype."""
    _launch(tensors, sizes, matrix, packs=True)


def unpack_rows(matrix: torch.Tensor, sizes: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
    """As in `copies/reference.py`; contiguous tensors of one dtype, rows that are contiguous each."""
    _launch(tensors, sizes, matrix, packs=False)


def _launch(tensors: Sequence[torch.Tensor], sizes: Sequence[int], matrix: torch.Tensor, *, packs: bool) -> None:
    device, first = matrix.device, tensors[0]
    numels = tuple([tensor.numel() for tensor in tensors])
    numbers, blocks, _ = blocks_of(tuple(sizes), _BLOCK, device)
    begin = first.data_ptr()
    distances = [tensor.data_ptr() - begin for tensor in tensors]
    storage = first.untyped_storage().data_ptr()
    if packs or any(tensor.untyped_storage().data_ptr() != storage for tensor in tensors):
        addresses = table_of(distances, device)
    else:
        # Places within one memory lie to each other as they did.
        addresses = _DISTANCES.table(tuple(distances), device)
    if first.dtype == matrix.dtype:
        of_matrix = of_tensor = _OF_BYTES[matrix.itemsize]
    else:
        of_matrix, of_tensor = DTYPES[matrix.dtype], DTYPES[first.dtype]
    with torch.cuda.device_of(matrix):
        _copy_rows[(numbers.shape[0], matrix.shape[0])](
            matrix,
            first,
            _ROWS.table((tuple(sizes), numels), device),
            addresses,
            numbers,
            blocks,
            matrix.stride(0),
            MATRIX=of_matrix,
            TENSOR=of_tensor,
            PACKS=packs,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )


def _rows_of(key: tuple[tuple[int, ...], tuple[int, ...]]) -> torch.Tensor:
    """Of each tensor: the elements of a piece, where that begins in a row, and the elements of all pieces."""
    sizes, numels = key
    return torch.tensor([*zip(sizes, accumulate(sizes, initial=0), numels, strict=False)])


_DISTANCES: Final = Constants(torch.tensor, 256)
_ROWS: Final = Constants(_rows_of, 256)
