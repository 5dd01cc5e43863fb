"""Writing one rank's data file: its plan's chunks and values as one file that the `safetensors` package can read.

The header is known from sizes alone, so the tensors stream past: to the CPU one by one, hashed, written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from disttrain.checkpoint.dtypes import dtype_name, safetensors_entry
from disttrain.checkpoint.layout import Box
from disttrain.checkpoint.manifest import BLOCK_BYTES, Chunk, SavedFile, block_checksums
from disttrain.checkpoint.storage import Storage
from disttrain.process_group.packing import pack

_DATA_ALIGNMENT = 4096
"""The data begin at a multiple of it, so that they can be mapped and read with direct I/O."""


@dataclass(frozen=True)
class Item:
    """What becomes one chunk: `tensor` is this rank's memory of it."""

    name: str
    box: Box
    tensor: torch.Tensor
    is_value: bool = False

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.itemsize


@dataclass(frozen=True)
class Written:
    """What one rank has written: its file, and the chunks of each tensor and value in it."""

    file: SavedFile | None = None
    parts: list[tuple[str, Chunk]] = field(default_factory=list)
    values: list[tuple[str, Chunk]] = field(default_factory=list)

    def to_plain(self) -> list[Any]:
        """For rank 0, which knows the file's name from the rank."""
        file = None if self.file is None else [self.file.num_bytes, self.file.header_bytes, self.file.header_checksums]
        return [file, *([_row(name, chunk) for name, chunk in kind] for kind in (self.parts, self.values))]

    @classmethod
    def from_plain(cls, plain: list[Any], file_name: str) -> Written:
        file, parts, values = plain
        return cls(
            None if file is None else SavedFile(*file),
            [_chunk(row, file_name) for row in parts],
            [_chunk(row, file_name) for row in values],
        )


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def value_item(name: str, value: Any) -> Item:
    """A value as the bytes of its packed form. Raises ShapeError when it is not one that can be packed."""
    data = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)
    return Item(name, Box.whole((data.numel(),)), data, is_value=True)


def write_items(storage: Storage, folder: Path, rank: int, items: list[Item], metadata: Mapping[str, str]) -> Written:
    """Write `items` to this rank's file, durably; no file where there is none. Errors: OSError."""
    if not items:
        return Written()
    # Larger elements first: each tensor then begins at a multiple of its element's size, without any gap.
    ordered = sorted(items, key=lambda item: (-item.tensor.itemsize, item.name, item.box))
    header = _header(ordered, metadata)
    written = Written(
        SavedFile(
            len(header) + sum(item.num_bytes for item in ordered),
            len(header),
            block_checksums(memoryview(header), BLOCK_BYTES),
        )
    )
    storage.write_file(folder / file_name(rank), _stream(header, ordered, file_name(rank), written))
    return written


def _stream(header: bytes, items: list[Item], file: str, written: Written) -> Iterator[memoryview]:
    """The parts of the file, entering each chunk in `written` as it goes by."""
    yield memoryview(header)
    offset = len(header)
    for item in items:
        data = _bytes_of(item.tensor)
        chunk = Chunk(file, offset, len(data), item.box, block_checksums(data, BLOCK_BYTES))
        (written.values if item.is_value else written.parts).append((item.name, chunk))
        offset += len(data)
        yield data


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().data


def _header(items: list[Item], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON, padded with spaces."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for item in items:
        dtype, shape = safetensors_entry(dtype_name(item.tensor.dtype), item.box.shape, item.num_bytes)
        end = offset + item.num_bytes
        entries[_key(item)] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    size = -(-(8 + len(text)) // _DATA_ALIGNMENT) * _DATA_ALIGNMENT
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)


def _key(item: Item) -> str:
    """The name; for a part that does not begin at the tensor's origin, with where it begins."""
    return item.name + ("@" + ",".join(map(str, item.box.origin)) if any(item.box.origin) else "")


def _row(name: str, chunk: Chunk) -> list[Any]:
    return [name, chunk.offset, chunk.num_bytes, list(chunk.box.origin), list(chunk.box.shape), chunk.checksums]


def _chunk(row: list[Any], file: str) -> tuple[str, Chunk]:
    name, offset, num_bytes, origin, shape, checksums = row
    return name, Chunk(file, offset, num_bytes, Box(tuple(origin), tuple(shape)), checksums)
