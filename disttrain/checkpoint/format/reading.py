"""Reads a manifest. One that is not ours, damaged or inconsistent is refused in one sentence. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.layout import Layout, Runs, num_ranks, runs_from_plain
from disttrain.checkpoint.format.manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    VERSION_WITH_TABLES,
    Chunk,
    Manifest,
    SavedFile,
    SavedTensor,
    Tables,
    TableSpan,
    TensorEntry,
    compact,
    plain_name,
)
from disttrain.checkpoint.format.rules import contradictions, is_text
from disttrain.checkpoint.format.spread import RankChunks, Spread, SpreadTensor
from disttrain.checkpoint.format.tables import FolderTables
from disttrain.checkpoint.storage.base import Readable, read_small
from disttrain.errors import CheckpointCorruptError, CheckpointError

TablesOf = Callable[[Mapping[str, SavedFile], int], Tables]


def decode(data: bytes, path: str, tables_of: TablesOf | None = None) -> Manifest:
    """The manifest in a file's bytes; `path` is for messages. `tables_of` makes the tables of its files; without it,
    chunks that are not listed cannot be asked for.

    Raises: CheckpointCorruptError when the checksum is wrong, or a rule of `format/rules.py` is broken;
    CheckpointError for another format or a newer version.
    """
    content = _verified(data, path)
    if content.get("format") != FORMAT:
        raise CheckpointError(
            "load", f"{path} has format {str(content.get('format'))[:40]!r}, not {FORMAT!r}.", _FOREIGN
        )
    if type(content.get("version")) is not int or content["version"] not in (VERSION, VERSION_WITH_TABLES):
        raise CheckpointError(
            "load",
            f"{path} has version {str(content.get('version'))[:20]}, this disttrain reads versions {VERSION} to "
            f"{VERSION_WITH_TABLES}.",
            f"Use the disttrain that wrote it ({content.get('made_by')}), or a newer one.",
        )
    try:
        manifest = _from_plain(content, tables_of)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError("load", f"{path} lacks or misspells {error}.", _FOREIGN) from error
    broken = next(contradictions(manifest), None)
    if broken is not None:
        raise CheckpointCorruptError("load", f"{path} contradicts itself: {broken}.", "Load another save.")
    return manifest


_MOST_RANKS = 1 << 24
_MOST_BLOCKS = 1 << 20

_FOREIGN = "Give a folder that disttrain.checkpoint wrote."


def read_manifest(storage: Readable, folder: Path) -> Manifest:
    """The manifest of the save in `folder`. Raises CheckpointError when there is none, or none that can be read."""
    try:
        names = storage.names(folder)
        if MANIFEST in names:
            return decode(
                read_small(storage, folder / MANIFEST),
                str(folder / MANIFEST),
                lambda files, block_bytes: FolderTables(storage, folder, files, block_bytes),
            )
    except (OSError, MemoryError) as error:
        remedy = "Load another save, or look after the file system."
        raise CheckpointCorruptError("load", f"{folder / MANIFEST} cannot be read: {error}.", remedy) from error
    problem = f"has no {MANIFEST}" if names else "is not there, or is empty"
    raise CheckpointError("load", f"{folder} {problem}: no save was finished there.", "Give the folder of a save.")


def _verified(data: bytes, path: str) -> dict[str, Any]:
    try:
        envelope = json.loads(data)
        content, checksum = envelope["content"], envelope["checksum"]
        good = xxhash.xxh3_64_hexdigest(compact(content)) == checksum and isinstance(content, dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        good, content = False, {}
    if not good:
        raise CheckpointCorruptError("load", f"{path} does not have the bytes that were saved.", "Load another save.")
    return dict(content)


def _from_plain(content: dict[str, Any], tables_of: TablesOf | None) -> Manifest:
    save_id, block_bytes = _text(content["save_id"]), _count(content["block_bytes"])
    files = {plain_name(name): _file_from_plain(file) for name, file in content["files"].items()}
    tables = None if tables_of is None else tables_of(files, max(block_bytes, 1))
    world_size = _count(content["world_size"])
    layouts = [_layout_from_plain(plain, world_size) for plain in _of_kind(list, content.get("layouts", []))]
    return Manifest(
        save_id=save_id,
        world_size=world_size,
        made_by=_text(content["made_by"]),
        block_bytes=block_bytes,
        files=files,
        tensors={
            name: _tensor_from_plain(name, tensor, layouts, tables) for name, tensor in content["tensors"].items()
        },
        values={name: _chunk_from_plain(chunk) for name, chunk in content["values"].items()},
        per_rank={
            name: _rank_chunks_from_plain(name, chunks, world_size, tables)
            for name, chunks in content["per_rank"].items()
        },
        same_as={name: _text(first) for name, first in content["same_as"].items()},
        tables=tables,
    )


def _file_from_plain(plain: dict[str, Any]) -> SavedFile:
    span = None
    if "table" in plain:
        offset, num_bytes, checksum = _of_kind(list, plain["table"])
        span = TableSpan(_count(offset), _count(num_bytes), bytes.fromhex(checksum))
    checksums = bytes.fromhex(plain["checksums"])
    return SavedFile(_count(plain["bytes"]), _count(plain["header_bytes"]), checksums, span)


def _tensor_from_plain(
    name: str, plain: dict[str, Any], layouts: Sequence[Layout], tables: Tables | None
) -> TensorEntry:
    shape, dtype = _counts(plain["shape"]), _text(plain["dtype"])
    if "layout" not in plain:
        return SavedTensor(shape, dtype, tuple(map(_chunk_from_plain, _of_kind(list, plain["chunks"]))))
    layout = layouts[_count(plain["layout"])]
    for cut in layout.cuts:
        if cut is not None and (cut[0] >= len(shape) or (cut[1] > 1 and shape[cut[0]] % cut[1])):
            raise ValueError(f"the layout of {name!r}, which cuts dim {cut[0]} in {cut[1]} blocks")
    first, count = map(_count, _of_kind(list, plain["writers"]))
    if not 0 < count <= layout.num_holders:
        raise ValueError(f"{count} writers of {name!r}")
    return SpreadTensor(shape, dtype, name, Spread(layout, first, count), tables)


def _layout_from_plain(plain: dict[str, Any], world_size: int) -> Layout:
    mesh_shape = _counts(plain["mesh_shape"])
    meshes = tuple(_runs_from_plain(runs, world_size) for runs in _of_kind(list, plain["meshes"]))
    cuts = tuple(None if cut is None else _cut_from_plain(cut) for cut in _of_kind(list, plain["cuts"]))
    blocks = math.prod(cut[1] for cut in cuts if cut is not None)
    sizes = {num_ranks(runs) for runs in meshes}
    if sizes != {math.prod(mesh_shape)} or len(cuts) != len(mesh_shape) or sum(map(num_ranks, meshes)) > world_size:
        raise ValueError(f"a layout of {len(cuts)} cuts, on a mesh of shape {_short(mesh_shape)}")
    if blocks > _MOST_BLOCKS:
        raise ValueError(f"a layout of {blocks} blocks")
    return Layout(meshes, mesh_shape, cuts)


def _cut_from_plain(plain: Any) -> tuple[int, int]:
    dim, blocks = map(_count, _of_kind(list, plain))
    if not blocks:
        raise ValueError("a cut of no blocks")
    return dim, blocks


def _runs_from_plain(plain: Any, world_size: int) -> Runs:
    rows = [_counts(run) for run in _of_kind(list, plain)]
    if any(len(row) != 3 or not row[1] or not row[2] for row in rows) or world_size > _MOST_RANKS:
        raise ValueError(f"the ranks {_short(plain)}")
    runs = runs_from_plain(rows)
    if any(run[-1] >= world_size for run in runs) or num_ranks(runs) > world_size:
        raise ValueError(f"the ranks {_short(plain)} of {world_size}")
    return runs


def _rank_chunks_from_plain(
    name: str, plain: dict[str, Any], world_size: int, tables: Tables | None
) -> Mapping[int, Chunk]:
    if "ranks" in plain:
        return RankChunks(name, _runs_from_plain(plain["ranks"], world_size), tables)
    return {_rank(rank): _chunk_from_plain(chunk) for rank, chunk in plain.items()}


def _chunk_from_plain(plain: dict[str, Any]) -> Chunk:
    box = Box(_counts(plain["origin"]), _counts(plain["shape"]))
    checksums = bytes.fromhex(plain["checksums"])
    return Chunk(_text(plain["file"]), _count(plain["offset"]), _count(plain["bytes"]), box, checksums)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"the count {_short(value)}")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(map(_count, _of_kind(list, values)))


def _rank(text: str) -> int:
    if not text.isdecimal() or str(int(text)) != text:
        raise ValueError(f"the rank {_short(text)}")
    return int(text)


def _text(value: Any) -> str:
    if not is_text(_of_kind(str, value)):
        raise ValueError(f"{_short(value)}, which is no text")
    return str(value)


def _of_kind(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{_short(value)}, which is no {kind.__name__}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:80]}..."
