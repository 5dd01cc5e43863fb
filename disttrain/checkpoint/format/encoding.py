"""Encodes a manifest as JSON. `docs/checkpoint_format.md` describes it. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xxhash

from disttrain.checkpoint.format.layout import Layout, runs_to_plain
from disttrain.checkpoint.format.manifest import (
    FORMAT,
    VERSION,
    VERSION_WITH_TABLES,
    Chunk,
    Manifest,
    SavedFile,
    TensorEntry,
    compact,
)
from disttrain.checkpoint.format.spread import RankChunks, SpreadTensor


def encode(manifest: Manifest) -> bytes:
    """The bytes of the file. It has the first version if it lists all chunks."""
    layouts: dict[Layout, int] = {}
    has_tables = any(file.table is not None for file in manifest.files.values())
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION_WITH_TABLES if has_tables else VERSION,
        "save_id": manifest.save_id,
        "world_size": manifest.world_size,
        "made_by": manifest.made_by,
        "block_bytes": manifest.block_bytes,
        "files": {name: _file_to_plain(file) for name, file in manifest.files.items()},
        "tensors": {name: _tensor_to_plain(tensor, layouts) for name, tensor in sorted(manifest.tensors.items())},
        "values": {name: _chunk_to_plain(chunk) for name, chunk in manifest.values.items()},
        "per_rank": {name: _rank_chunks_to_plain(chunks) for name, chunks in manifest.per_rank.items()},
        "same_as": dict(manifest.same_as),
    }
    if has_tables:
        content["layouts"] = [layout.to_plain() for layout in layouts]
    written = compact(content)
    return b'{"checksum":"%s","content":%s}\n' % (xxhash.xxh3_64_hexdigest(written).encode(), written)


def _file_to_plain(file: SavedFile) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "bytes": file.num_bytes, "header_bytes": file.header_bytes, "checksums": file.header_checksums.hex(),
    }  # fmt: skip
    if file.table is not None:
        plain["table"] = [file.table.offset, file.table.num_bytes, file.table.checksum.hex()]
    return plain


def _tensor_to_plain(tensor: TensorEntry, layouts: dict[Layout, int]) -> dict[str, Any]:
    plain: dict[str, Any] = {"shape": list(tensor.shape), "dtype": tensor.dtype}
    if isinstance(tensor, SpreadTensor):
        spread = tensor.spread
        return plain | {
            "layout": layouts.setdefault(spread.layout, len(layouts)),
            "writers": [spread.first, spread.count],
        }
    return plain | {"chunks": [_chunk_to_plain(chunk) for chunk in tensor.chunks]}


def _rank_chunks_to_plain(chunks: Mapping[int, Chunk]) -> dict[str, Any]:
    if isinstance(chunks, RankChunks):
        return {"ranks": runs_to_plain(chunks.ranks)}
    return {str(rank): _chunk_to_plain(chunk) for rank, chunk in chunks.items()}


def _chunk_to_plain(chunk: Chunk) -> dict[str, Any]:
    return {
        "file": chunk.file,
        "offset": chunk.offset,
        "bytes": chunk.num_bytes,
        "origin": list(chunk.box.origin),
        "shape": list(chunk.box.shape),
        "checksums": chunk.checksums.hex(),
    }
