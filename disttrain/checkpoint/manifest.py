"""The manifest: the file that makes a save valid. It names every file, tensor, chunk and checksum.

`docs/checkpoint_format.md` describes it. It is JSON, `{"checksum": ..., "content": ...}`; the checksum is that of the
content written compactly with sorted keys, so that a flipped bit anywhere in it is found.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from disttrain.checkpoint.box import Box
from disttrain.checkpoint.storage import Readable
from disttrain.errors import CheckpointCorruptError, CheckpointError

FORMAT = "disttrain-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
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
        """Where the chunks lie in the tensor."""
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
    compact = _compact(content)
    return b'{"checksum":"%s","content":%s}\n' % (xxhash.xxh3_64_hexdigest(compact).encode(), compact)


def decode(data: bytes, path: str) -> Manifest:
    """The manifest in a file's bytes; `path` is for messages.

    Raises: CheckpointCorruptError when the checksum is wrong; CheckpointError for another format or a newer version.
    """
    content = _verified(data, path)
    if content.get("format") != FORMAT:
        raise CheckpointError("load", f"{path} has format {content.get('format')!r}, not {FORMAT!r}.", _FOREIGN)
    if content.get("version") != VERSION:
        raise CheckpointError(
            "load",
            f"{path} has version {content.get('version')}, this disttrain reads version {VERSION}.",
            f"Use the disttrain that wrote it ({content.get('made_by')}), or a newer one.",
        )
    try:
        manifest = _from_plain(content)
        _check_chunks(manifest)
        return manifest
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError("load", f"{path} lacks or misspells {error}.", _FOREIGN) from error


_FOREIGN = "Give a folder that disttrain.checkpoint wrote."


def read_manifest(storage: Readable, folder: Path) -> Manifest:
    """The manifest of the save in `folder`. Raises CheckpointError when there is none."""
    names = storage.names(folder)
    if MANIFEST not in names:
        what = f"has no {MANIFEST}" if names else "is not there, or is empty"
        raise CheckpointError("load", f"{folder} {what}: no save was finished there.", "Give the folder of a save.")
    return decode(read_small(storage, folder / MANIFEST), str(folder / MANIFEST))


def read_small(storage: Readable, path: Path) -> bytes:
    """All of a file."""
    with storage.open_file(path) as file:
        data = bytearray(file.num_bytes)
        num_read = file.read_at(0, memoryview(data))
    return bytes(data[:num_read])


def _verified(data: bytes, path: str) -> dict[str, Any]:
    try:
        envelope = json.loads(data)
        content, checksum = envelope["content"], envelope["checksum"]
        good = xxhash.xxh3_64_hexdigest(_compact(content)) == checksum and isinstance(content, dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        good, content = False, {}
    if not good:
        raise CheckpointCorruptError("load", f"{path} does not have the bytes that were saved.", "Load another save.")
    return dict(content)


def _from_plain(content: dict[str, Any]) -> Manifest:
    return Manifest(
        save_id=str(content["save_id"]),
        world_size=_count(content["world_size"]),
        made_by=str(content["made_by"]),
        block_bytes=_count(content["block_bytes"]),
        files={
            plain_name(name): SavedFile(
                _count(file["bytes"]), _count(file["header_bytes"]), bytes.fromhex(file["checksums"])
            )
            for name, file in content["files"].items()
        },
        tensors={
            name: SavedTensor(
                _counts(tensor["shape"]), str(tensor["dtype"]), tuple(map(_chunk_from_plain, tensor["chunks"]))
            )
            for name, tensor in content["tensors"].items()
        },
        values={name: _chunk_from_plain(chunk) for name, chunk in content["values"].items()},
        per_rank={
            name: {int(rank): _chunk_from_plain(chunk) for rank, chunk in chunks.items()}
            for name, chunks in content["per_rank"].items()
        },
        same_as=dict(content["same_as"]),
    )


def _check_chunks(manifest: Manifest) -> None:
    if not manifest.block_bytes:
        raise ValueError("blocks of no bytes")
    for name, first in manifest.same_as.items():
        if first not in manifest.tensors:
            raise ValueError(f"{name!r}, which is {first!r}")
    for name, tensor in manifest.tensors.items():
        if any(len(box.origin) != len(tensor.shape) or len(box.shape) != len(tensor.shape) for box in tensor.boxes):
            raise ValueError(f"the dims of {name!r}")
    chunks = [chunk for tensor in manifest.tensors.values() for chunk in tensor.chunks]
    chunks += manifest.values.values()
    chunks += [chunk for by_rank in manifest.per_rank.values() for chunk in by_rank.values()]
    for chunk in chunks:
        file = manifest.files[chunk.file]
        fits = 0 <= file.header_bytes <= chunk.offset <= chunk.offset + chunk.num_bytes <= file.num_bytes
        if not fits or len(chunk.checksums) != 8 * math.ceil(chunk.num_bytes / manifest.block_bytes):
            raise ValueError(f"a chunk at {chunk.offset} of {chunk.file}")


def plain_name(name: str) -> str:
    """A file's name; ValueError for one that leads out of its folder."""
    if "/" in name or "\\" in name or name in {"", ".", ".."}:
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


def _chunk_from_plain(plain: dict[str, Any]) -> Chunk:
    box = Box(_counts(plain["origin"]), _counts(plain["shape"]))
    checksums = bytes.fromhex(plain["checksums"])
    return Chunk(plain["file"], _count(plain["offset"]), _count(plain["bytes"]), box, checksums)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"the count {value!r}")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(map(_count, values))


def _compact(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
