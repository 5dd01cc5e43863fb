"""Passes many tensors to one Triton launch: a table of addresses, and for each program its tensor and block of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final

import torch
import triton
import triton.language as tl

from disttrain.kernels.recording import kept_for_graph

DTYPES: Final = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_ALIGNMENT: Final = 16
"""Bytes that a thread reads at once where all addresses, and sizes too, are multiples of it."""


@triton.jit
def at(address, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """A tensor's beginning, whose address lies at `address`."""
    pointer = tl.load(address).to(tl.pointer_type(DTYPE))
    if IS_ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


def table_of(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """The rows on the device, which nobody waits for.

    A CUDA graph that is being recorded copies them at each replay: torch keeps pinned memory taken meanwhile for it.
    """
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


def kept_table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    """The rows on the device, copied there again only for other rows or another stream."""
    if device.type != "cuda":
        return table_of(rows, device)
    if torch.cuda.is_current_stream_capturing():
        # The graph would read a table that others have pushed out of here since.
        return table_of(rows, device)
    return _kept(rows, device, torch.cuda.current_stream(device).cuda_stream)


@lru_cache(maxsize=1024)
def _kept(rows: tuple[tuple[int, ...], ...], device: torch.device, stream: int) -> torch.Tensor:
    return table_of(rows, device)


def are_aligned(tensors: Iterable[torch.Tensor], addresses: Iterable[Sequence[int]]) -> bool:
    """True if threads may read so many bytes at once of all of them."""
    sizes = (tensor.numel() for tensor in tensors)
    return not any(number % _ALIGNMENT for number in chain(sizes, *addresses))


def blocks_of(sizes: tuple[int, ...], block: int, device: torch.device) -> tuple[Any, Any, Any]:
    """The tensor and the block of each program, in 32 bits, and each tensor's size; on the device."""
    return kept_for_graph(_blocks_of(sizes, block, device), device)


@lru_cache(maxsize=256)
def _blocks_of(sizes: tuple[int, ...], block: int, device: torch.device) -> tuple[Any, Any, Any]:
    counts = torch.tensor([triton.cdiv(size, block) for size in sizes])
    tensors = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    begins = counts.cumsum(0) - counts
    blocks = torch.arange(len(tensors)) - begins[tensors]
    return tensors.int().to(device), blocks.int().to(device), torch.tensor(sizes).to(device)
