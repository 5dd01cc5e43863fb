"""Tables for the command `ls`: a save's tensors, or the saves of a folder. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from disttrain.checkpoint.format.manifest import MANIFEST, Manifest
from disttrain.checkpoint.format.reading import read_manifest
from disttrain.checkpoint.format.rules import listed_chunks
from disttrain.checkpoint.storage.base import HOLD_SUFFIX, Storage
from disttrain.checkpoint.storage.folders import CLAIM, TEMPORARY
from disttrain.console import size_text, table
from disttrain.errors import CheckpointError


def described_save(manifest: Manifest) -> dict[str, Any]:
    """A save as plain values, for JSON and for the table."""
    return {
        "save_id": manifest.save_id,
        "made_by": manifest.made_by,
        "world_size": manifest.world_size,
        "num_bytes": data_bytes(manifest),
        "files": {name: file.num_bytes for name, file in manifest.files.items()},
        "tensors": {
            name: {
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "num_bytes": tensor.num_bytes,
                "num_chunks": len(tensor.chunks),
            }
            for name, tensor in manifest.tensors.items()
        },
        "same_as": dict(manifest.same_as),
        "values": {name: chunk.num_bytes for name, chunk in manifest.values.items()},
        "per_rank": {
            name: {str(rank): chunk.num_bytes for rank, chunk in chunks.items()}
            for name, chunks in manifest.per_rank.items()
        },
    }


def data_bytes(manifest: Manifest) -> int:
    """The bytes of all tensors and values."""
    if manifest.tables is not None:  # of our own format, whose files have nothing else but headers
        return sum(file.num_bytes - file.header_bytes for file in manifest.files.values())
    return sum(chunk.num_bytes for _, chunk in listed_chunks(manifest))


def summary(manifest: Manifest) -> dict[str, Any]:
    """A save in a few values, for which no table is read."""
    return {
        "save_id": manifest.save_id,
        "made_by": manifest.made_by,
        "world_size": manifest.world_size,
        "num_bytes": data_bytes(manifest),
        "num_tensors": len(manifest.tensors),
    }


def save_text(where: str, described: dict[str, Any]) -> str:
    """One line on the whole, one per name."""
    counts = ", ".join(
        _plural(len(described[kind]), word)
        for kind, word in (("tensors", "tensor"), ("same_as", "second name"), ("values", "value"))
        if described[kind] or kind == "tensors"
    )
    head = (
        f"{where}: {counts}; {size_text(described['num_bytes'])} in {_plural(len(described['files']), 'file')}; "
        f"saved by {_plural(described['world_size'], 'rank')} ({described['made_by']})"
    )
    rows = [
        (name, "x".join(map(str, tensor["shape"])) or "-", tensor["dtype"], size_text(tensor["num_bytes"]),
         str(tensor["num_chunks"]))
        for name, tensor in described["tensors"].items()
    ]  # fmt: skip
    rows += [(name, "", f"is {first}", "", "") for name, first in described["same_as"].items()]
    rows += [(name, "", "value", size_text(num_bytes), "1") for name, num_bytes in described["values"].items()]
    rows += [
        (name, "", "value per rank", size_text(sum(by_rank.values())), str(len(by_rank)))
        for name, by_rank in described["per_rank"].items()
    ]
    return head + "\n\n" + table(("name", "shape", "dtype", "size", "chunks"), sorted(rows), words=(0, 1, 2))


def described_folder(storage: Storage, folder: Path) -> dict[str, Any]:
    """The saves in a folder, and what is unfinished there, as plain values."""
    saves: dict[str, Any] = {}
    unfinished = []
    for name in storage.names(folder):
        if TEMPORARY.fullmatch(name):
            unfinished += [] if name.endswith(HOLD_SUFFIX) or CLAIM.fullmatch(name) else [name]
        elif MANIFEST in storage.names(folder / name):
            try:
                saves[name] = summary(read_manifest(storage, folder / name))
            except CheckpointError as error:
                saves[name] = {"problem": error.problem}
    return {"saves": saves, "unfinished": unfinished}


def folder_text(where: str, described: dict[str, Any]) -> str:
    """One line on the whole, one per save."""
    rows = [
        (name, "", "", "", save["problem"])
        if "problem" in save
        else (name, str(save["num_tensors"]), size_text(save["num_bytes"]), str(save["world_size"]), save["made_by"])
        for name, save in described["saves"].items()
    ]
    rows += [(name, "", "", "", "unfinished: under way, or dead") for name in described["unfinished"]]
    head = f"{where}: {_plural(len(described['saves']), 'save')}"
    return head + "\n\n" + table(("save", "tensors", "size", "ranks", "made by"), rows, words=(0, 4))


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
