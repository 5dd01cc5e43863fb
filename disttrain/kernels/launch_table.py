"""Passes many tensors to one Triton launch: a table of addresses, and for each program its tensor and block of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache, reduce
from operator import or_
from threading import Lock
from typing import Any, Final

import torch
import triton
import triton.language as tl

from disttrain.kernels.recording import current_recording, kept_for_graph

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


def table_of(rows: Sequence[Any], device: torch.device) -> torch.Tensor:
    """The rows on the device, which nobody waits for.

    Of a step that `capture_step` records they are there once and for all: copies at each replay, 7 us each between
    kernels of as much, would be a sixth of a small model's step. Another CUDA graph, of which nobody tells when it is
    gone, copies them at each replay: torch keeps pinned memory taken meanwhile for it.
    """
    if is_recorded(device) and (kept := _in_recording(torch.tensor(rows, dtype=torch.int64))) is not None:
        return kept
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


def is_recorded(device: torch.device) -> bool:
    """True while what is launched on `device` becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Constants:
    """Tables that follow from what they are asked by, on the device, which the host waits for when they are new.

    Args: make  the table of a key, on the CPU.
          size  how many are kept, of the latest.
    """

    def __init__(self, make: Callable[[Any], torch.Tensor], size: int) -> None:
        self._make, self._size = make, size
        self._tables: OrderedDict[Any, torch.Tensor] = OrderedDict()
        self._lock = Lock()

    def table(self, key: Hashable, device: torch.device) -> torch.Tensor:
        place = key, device
        with self._lock:
            if (found := self._tables.get(place)) is not None:
                self._tables.move_to_end(place)
                return kept_for_graph(found, device)
        values = self._make(key)
        if is_recorded(device):
            kept = _in_recording(values, (self, key))
            return values.pin_memory().to(device, non_blocking=True) if kept is None else kept
        table = values.to(device)
        with self._lock:
            self._tables[place] = table
            if len(self._tables) > self._size:
                self._tables.popitem(last=False)
        return table


def _in_recording(values: torch.Tensor, key: object = None) -> torch.Tensor | None:
    recording = current_recording()
    return None if recording is None else recording.table(values, key)


def kept_table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    """The rows on the device, copied there again only for other rows or another stream."""
    if device.type != "cuda":
        return table_of(rows, device)
    if is_recorded(device):
        # The graph would read a table that others have pushed out of here since.
        return table_of(rows, device)
    return _kept(rows, device, torch.cuda.current_stream(device).cuda_stream)


@lru_cache(maxsize=1024)
def _kept(rows: tuple[tuple[int, ...], ...], device: torch.device, stream: int) -> torch.Tensor:
    return table_of(rows, device)


def are_aligned(tensors: Iterable[torch.Tensor], addresses: Iterable[Sequence[int]]) -> bool:
    """True if threads may read so many bytes at once of all of them."""
    return are_multiples([[tensor.numel() for tensor in tensors], *addresses])


def are_multiples(numbers: Iterable[Iterable[int]]) -> bool:
    """True if all of them are multiples of what a thread reads at once."""
    return not any(reduce(or_, some, 0) % _ALIGNMENT for some in numbers)


def blocks_of(
    sizes: tuple[int, ...], block: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tensor and the block of each program, in 32 bits, and each tensor's size; on the device."""
    programs = _PROGRAMS.table((sizes, block), device)
    return programs[0], programs[1], _SIZES.table(sizes, device)


def _programs_of(key: tuple[tuple[int, ...], int]) -> torch.Tensor:
    sizes, block = key
    counts = torch.tensor([triton.cdiv(size, block) for size in sizes])
    tensors = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    begins = counts.cumsum(0) - counts
    return torch.stack([tensors, torch.arange(len(tensors)) - begins[tensors]]).int()


_PROGRAMS: Final = Constants(_programs_of, 256)
_SIZES: Final = Constants(torch.tensor, 256)
