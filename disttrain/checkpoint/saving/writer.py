"""Writing one rank's data file: its plan's chunks and values as one file that the `safetensors` package can read.

The header is known from sizes alone, so the tensors stream past in slices: to the CPU, hashed, written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.dtypes import dtype_name, safetensors_entry
from disttrain.checkpoint.format.image import SLICE_BYTES, Entry, Image, Kind, Written, make_image, slices
from disttrain.checkpoint.format.manifest import file_name
from disttrain.checkpoint.storage.base import Storage
from disttrain.process_group.calls.packing import pack


@dataclass(frozen=True)
class Item:
    """A tensor in this rank's memory that becomes one chunk."""

    name: str
    box: Box
    tensor: torch.Tensor
    kind: Kind = "tensor"

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.itemsize

    def entry(self) -> Entry:
        dtype, shape = safetensors_entry(dtype_name(self.tensor.dtype), self.box.shape, self.num_bytes)
        return Entry(self.name, self.box, self.num_bytes, dtype, shape, self.kind)


def value_item(name: str, value: Any, kind: Kind = "value") -> Item:
    """A value as the bytes of its packed form. Raises ShapeError when it is not one that can be packed."""
    data = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)
    return Item(name, Box.whole((data.numel(),)), data, kind)


def in_file_order(items: Sequence[Item]) -> list[Item]:
    """Larger elements first."""
    return sorted(items, key=lambda item: (-item.tensor.itemsize, item.name, item.box))


def image_of(items: Sequence[Item], metadata: Mapping[str, str]) -> Image:
    """The file of these items, which are in its order."""
    return make_image([item.entry() for item in items], metadata)


def write_items(storage: Storage, folder: Path, rank: int, items: list[Item], metadata: Mapping[str, str]) -> Written:
    """Write `items` to this rank's file, durably; no file where there is none. Errors: OSError."""
    if not items:
        return Written()
    ordered, file = in_file_order(items), file_name(rank)
    image = image_of(ordered, metadata)
    written = Written(image.saved_file())
    storage.write_file(folder / file, image.parts(file, lambda number: _slices_of(ordered[number].tensor), written))
    return written


def _slices_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The tensor's bytes. From a GPU slice by slice, so that one is written while the next one is copied."""
    if not tensor.numel():
        return
    tensor = tensor.detach()
    # Conversions are made on the host, since a GPU may have no memory for them.
    if not tensor.is_cuda or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        yield from slices(_bytes_of(tensor.cpu().resolve_conj().resolve_neg().contiguous()).numpy().data)
        return
    for part in _bytes_of(tensor).split(SLICE_BYTES):
        # Pinned memory goes back to torch, to be used again, when the slice has been written.
        yield torch.empty(part.shape, dtype=torch.uint8, pin_memory=True).copy_(part).numpy().data


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    # A single element may have any stride, and is contiguous.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
