"""Commits a save: a temporary folder, a manifest of what all ranks have written, one rename. Torch-free.

Until the rename there is only a folder `NAME.tmp-<save id>`. A save that dies before leaves that folder, and older
saves are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from disttrain.checkpoint.format.encoding import encode
from disttrain.checkpoint.format.image import Report
from disttrain.checkpoint.format.layout import Layout, Runs, runs_from_plain, runs_to_plain
from disttrain.checkpoint.format.manifest import (
    MANIFEST,
    TABLES,
    TORCH_METADATA,
    Chunk,
    Manifest,
    SavedFile,
    SavedTensor,
    TableSpan,
    TensorEntry,
    file_name,
)
from disttrain.checkpoint.format.spread import RankChunks, Spread, SpreadTensor
from disttrain.checkpoint.format.tables import checksum_of
from disttrain.checkpoint.storage.base import Storage
from disttrain.checkpoint.storage.claims import check_claim
from disttrain.checkpoint.storage.folders import STEP, remove_if_there, remove_leftovers, set_aside, steps, temporary
from disttrain.checkpoint.storage.replacing import check_room, put_in_place
from disttrain.errors import CheckpointError

MARK = (
    b"This folder is a save of disttrain.checkpoint, whose load() reads it; manifest.json says what it has.\n"
    b"For torch.distributed.checkpoint: python -m disttrain.checkpoint convert FROM TO --to dcp\n"
)
"""The content of the file with torch's metadata's name, which other programs look for to know a finished save."""


@dataclass(frozen=True)
class Contents:
    """The contents of a save, but for where they lie: global shape and dtype of each tensor, how those lie that a mesh
    cuts, the ranks that have a value per rank, and so on."""

    made_by: str
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    per_rank: Mapping[str, Runs]
    same_as: Mapping[str, str]
    spreads: Mapping[str, Spread] = field(default_factory=dict)

    def to_plain(self) -> list[Any]:
        tensors = {name: [list(shape), dtype] for name, (shape, dtype) in self.tensors.items()}
        per_rank = {name: runs_to_plain(runs) for name, runs in self.per_rank.items()}
        numbers: dict[Layout, int] = {}
        spreads = {
            name: [numbers.setdefault(spread.layout, len(numbers)), spread.first, spread.count]
            for name, spread in self.spreads.items()
        }
        layouts = [layout.to_plain() for layout in numbers]
        return [self.made_by, tensors, per_rank, dict(self.same_as), layouts, spreads]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Contents:
        made_by, tensors, per_rank, same_as, plain_layouts, spreads = plain
        layouts = [Layout.from_plain(layout) for layout in plain_layouts]
        return cls(
            made_by,
            {name: (tuple(row[0]), row[1]) for name, row in tensors.items()},
            {name: runs_from_plain(runs) for name, runs in per_rank.items()},
            same_as,
            {name: Spread(layouts[number], first, count) for name, (number, first, count) in spreads.items()},
        )


@dataclass(frozen=True)
class Target:
    """Destination of a save. `claim`: what rank 0 saves a Checkpointer's step by (`storage/claims.py`); None for other
    saves, and empty on other ranks. `overwrites`: a save that is at `path` gives way. `is_marked`: there is a file of
    torch's name, too, for programs that look for one."""

    path: Path
    save_id: str
    claim: str | None = None
    overwrites: bool = False
    is_marked: bool = False

    @property
    def folder(self) -> Path:
        """The folder as long as the save is not committed."""
        return temporary(self.path, self.save_id)


def check_names(names: Sequence[str]) -> None:
    """Raises unless all ranks save to one path."""
    if len(set(names)) > 1:
        raise CheckpointError("save", f"ranks save to {sorted(set(names))}.", "Save one step at a time.")


@contextmanager
def temporary_folder(storage: Storage, target: Target) -> Iterator[None]:
    """Creates the temporary folder on rank 0, to be removed at the end unless it has been moved."""
    check_target(storage, target)
    remove_leftovers(storage, target.path.parent, lambda name: _is_ours(target, name))
    check_room(storage, target.path, overwrites=target.overwrites)
    with storage.hold(target.folder):
        try:
            storage.make_folder(target.folder)
            yield
        finally:
            remove_if_there(storage, target.folder)


def check_target(storage: Storage, target: Target) -> None:
    """Raises CheckpointError when this job may not save there any more."""
    if target.claim is not None:
        check_claim(storage, target.path.parent, target.claim)


def _is_ours(target: Target, name: str) -> bool:
    return bool(STEP.fullmatch(name)) if target.claim is not None else name == target.path.name


def commit(storage: Storage, target: Target, contents: Contents, rows: Sequence[list[Any]]) -> None:
    """Makes the save valid, durably; on rank 0, from what each rank has written."""
    if target.is_marked:
        storage.write_file(target.folder / TORCH_METADATA, [memoryview(MARK)])
    for name, data in files_about(target.save_id, contents, rows).items():
        storage.write_file(target.folder / name, data)
    storage.sync_folder(target.folder)
    check_target(storage, target)
    put_in_place(storage, target.folder, target.path, overwrites=target.overwrites)


def files_about(save_id: str, contents: Contents, rows: Sequence[list[Any]]) -> dict[str, list[memoryview]]:
    """The parts of the files that say what is in the save, from what each rank has written; the manifest is the last of
    them."""
    reports = [Report.from_plain(row, file_name(rank)) for rank, row in enumerate(rows)]
    tables = [memoryview(report.table) for report in reports if report.table]
    manifest = memoryview(encode(make_manifest(save_id, contents, reports)))
    return {**({TABLES: tables} if tables else {}), MANIFEST: [manifest]}


def make_manifest(save_id: str, contents: Contents, reports: Sequence[Report]) -> Manifest:
    """The manifest that rank 0 writes, from what each rank had and has written. Pure."""
    chunks: dict[str, list[Chunk]] = {}
    values: dict[str, Chunk] = {}
    files: dict[str, SavedFile] = {}
    offset = 0
    for rank, report in enumerate(reports):
        for name, chunk in report.parts:
            chunks.setdefault(name, []).append(chunk)
        values.update(report.values)
        if report.file is not None:
            span = TableSpan(offset, len(report.table), checksum_of(report.table)) if report.table else None
            files[file_name(rank)] = replace(report.file, table=span)
            offset += len(report.table)

    def tensor(name: str, shape: tuple[int, ...], dtype: str) -> TensorEntry:
        spread = contents.spreads.get(name)
        if spread is not None and 0 not in shape:
            return SpreadTensor(shape, dtype, name, spread)
        return SavedTensor(shape, dtype, tuple(sorted(chunks.get(name, ()), key=lambda chunk: chunk.box)))

    return Manifest(
        save_id=save_id,
        world_size=len(reports),
        made_by=contents.made_by,
        files=files,
        tensors={name: tensor(name, shape, dtype) for name, (shape, dtype) in contents.tensors.items()},
        values=values,
        per_rank={name: RankChunks(name, runs) for name, runs in contents.per_rank.items()},
        same_as=contents.same_as,
    )


def retire_old(storage: Storage, directory: Path, step: int, keep: int | None) -> list[Path]:
    """Set aside all but the `keep` newest saves; never that of `step`, which was just made. Returns: what to remove.

    Raises CheckpointError.
    """
    others = [(other, folder) for other, folder in steps(storage, directory).items() if other != step]
    num_kept = len(others) if keep is None else keep - 1
    dying = []
    for old, folder in others[: max(0, len(others) - num_kept)]:
        try:
            dying.append(set_aside(storage, folder))
        except OSError as error:
            raise CheckpointError(
                "save", f"step {step} is saved, but step {old} could not be removed: {error}.", "Remove it by hand."
            ) from error
    return dying
