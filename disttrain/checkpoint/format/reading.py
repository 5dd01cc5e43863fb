"""Reads a manifest. One that is not ours, damaged or inconsistent is refused in one sentence. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    Chunk,
    Manifest,
    SavedFile,
    SavedTensor,
    compact,
    plain_name,
)
from disttrain.checkpoint.format.rules import contradictions, is_text
from disttrain.checkpoint.storage.base import Readable, read_small
from disttrain.errors import CheckpointCorruptError, CheckpointError


def decode(data: bytes, path: str) -> Manifest:
    """The manifest in a file's bytes; `path` is for messages.

    Raises: CheckpointCorruptError when the checksum is wrong, or a rule of `format/rules.py` is broken;
    CheckpointError for another format or a newer version.
    """
    content = _verified(data, path)
    if content.get("format") != FORMAT:
        raise CheckpointError(
            "load", f"{path} has format {str(content.get('format'))[:40]!r}, not {FORMAT!r}.", _FOREIGN
        )
    if type(content.get("version")) is not int or content["version"] != VERSION:
        raise CheckpointError(
            "load",
            f"{path} has version {str(content.get('version'))[:20]}, this disttrain reads version {VERSION}.",
            f"Use the disttrain that wrote it ({content.get('made_by')}), or a newer one.",
        )
    try:
        manifest = _from_plain(content)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError("load", f"{path} lacks or misspells {error}.", _FOREIGN) from error
    broken = next(contradictions(manifest), None)
    if broken is not None:
        raise CheckpointCorruptError("load", f"{path} contradicts itself: {broken}.", "Load another save.")
    return manifest


_FOREIGN = "Give a folder that disttrain.checkpoint wrote."


def read_manifest(storage: Readable, folder: Path) -> Manifest:
    """The manifest of the save in `folder`. Raises CheckpointError when there is none, or none that can be read."""
    try:
        names = storage.names(folder)
        if MANIFEST in names:
            return decode(read_small(storage, folder / MANIFEST), str(folder / MANIFEST))
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


def _from_plain(content: dict[str, Any]) -> Manifest:
    return Manifest(
        save_id=_text(content["save_id"]),
        world_size=_count(content["world_size"]),
        made_by=_text(content["made_by"]),
        block_bytes=_count(content["block_bytes"]),
        files={
            plain_name(name): SavedFile(
                _count(file["bytes"]), _count(file["header_bytes"]), bytes.fromhex(file["checksums"])
            )
            for name, file in content["files"].items()
        },
        tensors={
            name: SavedTensor(
                _counts(tensor["shape"]),
                _text(tensor["dtype"]),
                tuple(map(_chunk_from_plain, _of_kind(list, tensor["chunks"]))),
            )
            for name, tensor in content["tensors"].items()
        },
        values={name: _chunk_from_plain(chunk) for name, chunk in content["values"].items()},
        per_rank={
            name: {_rank(rank): _chunk_from_plain(chunk) for rank, chunk in chunks.items()}
            for name, chunks in content["per_rank"].items()
        },
        same_as={name: _text(first) for name, first in content["same_as"].items()},
    )


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
