"""The manifest: the file that makes a save valid. It names every file, tensor, chunk and checksum.

`docs/checkpoint_format.md` describes it. It is JSON, `{"checksum": ..., "content": ...}`; the checksum is that of the
content written compactly with sorted keys, so that a flipped bit anywhere in it is found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from disttrain.checkpoint.format.box import Box

FORMAT = "disttrain-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
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


@dataclass(frozen=True)
class SavedTensor:
    """A tensor's global shape and dtype, and the chunks that make it up."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    @property
    def boxes(self) -> list[Box]:
        """The parts of the tensor that its chunks hold."""
        return [chunk.box for chunk in self.chunks]


@dataclass(frozen=True)
class SavedFile:
    """A data file's size, and its header's, with the header's checksums."""

    num_bytes: int
    header_bytes: int
    header_checksums: bytes


@dataclass(frozen=True)
class Manifest:
    """A whole save. `per_rank` has a chunk per rank that saved a value; `same_as` maps second names to first ones."""

    save_id: str
    world_size: int
    made_by: str
    files: Mapping[str, SavedFile]
    tensors: Mapping[str, SavedTensor]
    values: Mapping[str, Chunk]
    per_rank: Mapping[str, Mapping[int, Chunk]]
    same_as: Mapping[str, str] = field(default_factory=dict)
    block_bytes: int = BLOCK_BYTES

    def tensor_named(self, name: str) -> SavedTensor | None:
        """The tensor saved by this name, which may be its second one."""
        return self.tensors.get(self.same_as.get(name, name))


def block_checksums(data: memoryview, block_bytes: int) -> bytes:
    """8 bytes of xxh3_64, big-endian, for each block."""
    return b"".join(
        xxhash.xxh3_64_digest(data[start : start + block_bytes]) for start in range(0, len(data), block_bytes)
    )


def encode(manifest: Manifest) -> bytes:
    """The file's bytes."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": manifest.save_id,
        "world_size": manifest.world_size,
        "made_by": manifest.made_by,
        "block_bytes": manifest.block_bytes,
        "files": {
            name: {"bytes": file.num_bytes, "header_bytes": file.header_bytes, "checksums": file.header_checksums.hex()}
            for name, file in manifest.files.items()
        },
        "tensors": {
            name: {
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "chunks": [_chunk_to_plain(chunk) for chunk in tensor.chunks],
            }
            for name, tensor in manifest.tensors.items()
        },
        "values": {name: _chunk_to_plain(chunk) for name, chunk in manifest.values.items()},
        "per_rank": {
            name: {str(rank): _chunk_to_plain(chunk) for rank, chunk in chunks.items()}
            for name, chunks in manifest.per_rank.items()
        },
        "same_as": dict(manifest.same_as),
    }
    written = compact(content)
    return b'{"checksum":"%s","content":%s}\n' % (xxhash.xxh3_64_hexdigest(written).encode(), written)


def plain_name(name: str) -> str:
    """A file's name; ValueError for one that leads out of its folder."""
    if any(sign in name for sign in "/\\\0") or name in {"", ".", ".."}:
        raise ValueError(f"file name {name!r}")
    return name


def _chunk_to_plain(chunk: Chunk) -> dict[str, Any]:
    return {
        "file": chunk.file,
        "offset": chunk.offset,
        "bytes": chunk.num_bytes,
        "origin": list(chunk.box.origin),
        "shape": list(chunk.box.shape),
        "checksums": chunk.checksums.hex(),
    }


def compact(content: Any) -> bytes:
    """The content as its checksum sees it."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
