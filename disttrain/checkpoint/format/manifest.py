"""The manifest: the file that makes a save valid. It names every file, tensor, chunk and checksum.

`docs/checkpoint_format.md` describes it. It is JSON, `{"checksum": ..., "content": ...}`; the checksum is that of the
content written compactly with sorted keys, so that a flipped bit anywhere in it is found.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import xxhash

from disttrain.checkpoint.format.box import Box

FORMAT = "disttrain-checkpoint"
VERSION = 1
VERSION_WITH_TABLES = 2
"""Manifests that list all chunks have the first version, which every disttrain reads."""
MANIFEST = "manifest.json"
TABLES = "manifest.tables"
"""The file with a table of chunks for each data file, see `format/tables.py`."""
TORCH_METADATA = ".metadata"
"""The file that makes a folder a save of torch.distributed.checkpoint; for ours, see `saving/commit.py`."""
BLOCK_BYTES = 1 << 20
"""Each block of so many bytes of a chunk has a checksum of its own, so that a part can be read and verified."""


@dataclass(frozen=True)
class Chunk:
    """One box of a tensor (or one packed value), row-major, at `offset` of `file`; `checksums`: 8 bytes per block."""

    file: str
    offset: int
    num_bytes: int
    box: Box
    checksums: bytes


class TensorEntry(Protocol):
    """A tensor's global shape and dtype, and the chunks that make it up."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def chunks(self) -> tuple[Chunk, ...]: ...

    @property
    def boxes(self) -> list[Box]:
        """The parts of the tensor that its chunks hold."""
        ...

    def chunks_near(self, box: Box) -> Sequence[Chunk]:
        """The chunks that may have elements of the box."""
        ...


@dataclass(frozen=True)
class SavedTensor:
    """A tensor whose chunks are listed. Satisfies `TensorEntry`."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)

    @property
    def boxes(self) -> list[Box]:
        return [chunk.box for chunk in self.chunks]

    def chunks_near(self, box: Box) -> Sequence[Chunk]:
        dim, starts, in_order, longest = self._order
        if dim is None:
            return in_order
        first = bisect_right(starts, box.origin[dim] - longest)
        return in_order[first : bisect_left(starts, box.origin[dim] + box.shape[dim])]

    @cached_property
    def _order(self) -> tuple[int | None, list[int], tuple[Chunk, ...], int]:
        """The dim with the most cuts; where chunks begin there, and the chunks, in this order; the longest of them."""
        num_dims = {len(chunk.box.origin) for chunk in self.chunks}
        if len(self.chunks) < 2 or num_dims != {len(self.shape)} or not self.shape:
            return None, [], self.chunks, 0
        dim = max(range(len(self.shape)), key=lambda dim: len({chunk.box.origin[dim] for chunk in self.chunks}))
        in_order = tuple(sorted(self.chunks, key=lambda chunk: chunk.box.origin[dim]))
        starts = [chunk.box.origin[dim] for chunk in in_order]
        return dim, starts, in_order, max(chunk.box.shape[dim] for chunk in in_order)


class TableSpan(NamedTuple):
    """The bytes of `TABLES` that are a data file's table, with their checksum."""

    offset: int
    num_bytes: int
    checksum: bytes


@dataclass(frozen=True)
class SavedFile:
    """A data file's size, and its header's, with the header's checksums; its table, if the manifest does not list all
    that is in it."""

    num_bytes: int
    header_bytes: int
    header_checksums: bytes
    table: TableSpan | None = None


class Tables(Protocol):
    """The chunks of a save by the file that has them. Raises CheckpointCorruptError for a damaged one."""

    @property
    def files(self) -> Collection[str]:
        """The files that have a table."""
        ...

    def need(self, files: Iterable[str]) -> None:
        """Reads the tables of these files together, where they are not known."""
        ...

    def chunks(self, file: str, name: str) -> tuple[Chunk, ...]:
        """The chunks in `file` of what is saved as `name`."""
        ...

    def of(self, file: str) -> Mapping[str, tuple[Chunk, ...]]:
        """All chunks in the table of a file, by name."""
        ...


@dataclass(frozen=True)
class Manifest:
    """A whole save. `per_rank` has a chunk per rank that saved a value; `same_as` maps second names to first ones."""

    save_id: str
    world_size: int
    made_by: str
    files: Mapping[str, SavedFile]
    tensors: Mapping[str, TensorEntry]
    values: Mapping[str, Chunk]
    per_rank: Mapping[str, Mapping[int, Chunk]]
    same_as: Mapping[str, str] = field(default_factory=dict)
    block_bytes: int = BLOCK_BYTES
    tables: Tables | None = field(default=None, compare=False, repr=False)

    def tensor_named(self, name: str) -> TensorEntry | None:
        """The tensor saved by this name, which may be its second one."""
        return self.tensors.get(self.same_as.get(name, name))


def block_checksums(data: memoryview, block_bytes: int) -> bytes:
    """8 bytes of xxh3_64, big-endian, for each block."""
    return b"".join(
        xxhash.xxh3_64_digest(data[start : start + block_bytes]) for start in range(0, len(data), block_bytes)
    )


def file_name(rank: int) -> str:
    """The name of the data file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def plain_name(name: str) -> str:
    """A file's name; ValueError for one that leads out of its folder."""
    if any(sign in name for sign in "/\\\0") or name in {"", ".", ".."}:
        raise ValueError(f"file name {name!r}")
    return name


def compact(content: Any) -> bytes:
    """The content as its checksum sees it."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
