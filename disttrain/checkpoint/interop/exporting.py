"""Writes other formats from a save of any format: in parts that ranks share, committed by one rename.

A state in memory is first saved in our own format beside the target, and exported from there. So every mesh, pipeline
and placement is written by the one tested way, and no rank holds more than a part at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import torch

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.dtypes import dtype_named
from disttrain.checkpoint.format.manifest import Manifest
from disttrain.checkpoint.format.source import Source
from disttrain.checkpoint.loading.load import open_save
from disttrain.checkpoint.plan import plan_load
from disttrain.checkpoint.saving.consensus import Consensus
from disttrain.checkpoint.saving.save import save_folder
from disttrain.checkpoint.storage.base import Storage
from disttrain.checkpoint.storage.folders import remove_if_there, remove_leftovers, temporary
from disttrain.checkpoint.storage.replacing import check_room, put_in_place
from disttrain.errors import CheckpointError

Job = Any
"""A file to be written; its form depends on the format."""
Advance = Callable[[int], None]


class Format(Protocol):
    """Writes a save in one format."""

    def jobs(self, manifest: Manifest) -> list[Job]:
        """The data files, the same on every rank. Raises CheckpointError for what has no place in the format."""
        ...

    def write(self, storage: Storage, folder: Path, source: Source, job: Job, advance: Advance) -> Any:
        """Write one file; returns plain values for `finish`."""
        ...

    def finish(self, storage: Storage, folder: Path, manifest: Manifest, rows: list[Any]) -> None:
        """Writes the files that complete the folder, from the results of the jobs."""
        ...


def export(
    consensus: Consensus,
    open_source: Callable[[], Source],
    target: Path,
    storage: Storage,
    form: Format,
    advance: Advance = lambda num_bytes: None,
    *,
    overwrites: bool = False,
) -> None:
    """Write a save to the new folder `target`, in another format. Collective.

    `advance` hears how many more bytes have been written.
    """
    with ExitStack() as stack:

        def begin(_: list[None]) -> str:
            remove_leftovers(storage, target.parent, lambda name: name == target.name)
            check_room(storage, target, overwrites=overwrites)
            export_id = uuid4().hex
            folder = temporary(target, export_id)
            stack.enter_context(storage.hold(folder))
            stack.callback(remove_if_there, storage, folder)
            storage.make_folder(folder)
            return export_id

        folder = temporary(target, consensus.agree(lambda: None, begin))

        def write() -> list[Any]:
            source = open_source()
            rows = []
            for number, job in list(enumerate(form.jobs(source.manifest)))[consensus.rank :: consensus.size]:
                rows.append([number, form.write(storage, folder, source, job, advance)])
            return rows

        def finish(rows: list[list[Any]]) -> None:
            by_number = sorted(row for of_rank in rows for row in of_rank)
            form.finish(storage, folder, open_source().manifest, [row for _, row in by_number])
            storage.sync_folder(folder)
            put_in_place(storage, folder, target, overwrites=overwrites)

        consensus.agree(write, finish)


def save_as(
    consensus: Consensus,
    state: dict[str, Any],
    target: Path,
    storage: Storage,
    form: Format,
    *,
    overwrites: bool = False,
) -> None:
    """Save a state in another format. Collective."""
    with ExitStack() as stack:

        def begin(_: list[None]) -> str:
            remove_leftovers(storage, target.parent, lambda name: name == target.name)
            check_room(storage, target, overwrites=overwrites)
            own_id = uuid4().hex
            stack.enter_context(storage.hold(temporary(target, own_id)))
            return own_id

        native = temporary(target, consensus.agree(lambda: None, begin))
        if consensus.rank == 0:
            stack.callback(remove_if_there, storage, native)
        save_folder(consensus, state, native, storage)
        export(consensus, lambda: open_save(storage, native), target, storage, form, overwrites=overwrites)


def read_box(source: Source, name: str, box: Box) -> torch.Tensor:
    """A part of a saved tensor, on the CPU."""
    saved = source.manifest.tensors[name]
    part = torch.empty(box.shape, dtype=dtype_named(saved.dtype))
    if box.num_elements:
        targets = {name: {box: part}}
        source.reader.read_tensors(plan_load(source.manifest, targets), targets)
    return part


def refuse_values_per_rank(operation: str, manifest: Manifest) -> None:
    """Raise CheckpointError where there are values that each rank has its own of."""
    if manifest.per_rank:
        name = next(iter(manifest.per_rank))
        problem = f"{name!r} is a value per rank, which that format does not know."
        raise CheckpointError(operation, problem, leave_out(name))


def leave_out(name: str) -> str:
    """The remedy for what a format has no place for."""
    part = name.partition("/")[0]
    return f"Leave it out; of a save that is converted: --without {part} (in Python without={part!r})."
