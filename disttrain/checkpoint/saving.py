"""Saving, collectively: agree on the plan, write, agree on the outcome, commit by one rename.

Until the rename there is only a folder `NAME.tmp-<save id>`; whatever dies before leaves that, and the saves before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import xxhash

from disttrain import __version__
from disttrain.checkpoint.agreement import Council
from disttrain.checkpoint.manifest import FORMAT, MANIFEST, VERSION, Chunk, Manifest, SavedTensor, encode
from disttrain.checkpoint.plan import Outline, RankPlan, plan_save
from disttrain.checkpoint.stateful import PerRank, Value
from disttrain.checkpoint.storage import HOLD_SUFFIX, LocalStorage, Storage
from disttrain.checkpoint.tree import Tree, local_parts, take_apart
from disttrain.checkpoint.writer import Item, Written, file_name, value_item, write_items
from disttrain.errors import CheckpointError
from disttrain.process_group.packing import pack

_TEMPORARY = re.compile(rf"(.+)\.tmp-[0-9a-f]{{32}}(?:{re.escape(HOLD_SUFFIX)})?")


def save(state_dict: dict[str, Any], path: str | Path, *, storage: Storage | None = None) -> None:
    """Save a state into the new folder `path`.

    Args:    state_dict  dicts, to any depth, of tensors, DTensors, modules, Statefuls, PerRank and plain values. A
                         plain tensor or value is taken to be equal on all ranks: one of them writes it.
             storage     where `path` is; default: the local or a shared file system.
    Returns: once all is on the disk, and `path` is a whole save.
    Raises:  CheckpointError, on every rank, when it could not be saved on some; then `path` is not there.
    Collective: every rank of the default world, or one process without a world.
    """
    target = Path(path)
    save_folder(Council("save"), state_dict, target, storage or LocalStorage(), lambda name: name == target.name)


def save_folder(
    council: Council, state: dict[str, Any], target: Path, storage: Storage, is_ours: Callable[[str], bool]
) -> None:
    """`save`, that first removes what dead saves to folders beside `target` that are ours have left."""
    tree = Tree(council.operation)
    outline = Outline()
    with ExitStack() as held:

        def describe() -> tuple[bytes, str]:
            nonlocal tree, outline
            tree = take_apart(council.operation, state)
            outline = tree.outline()
            return xxhash.xxh3_128_digest(pack(outline.to_plain())), target.name

        def begin(described: list[tuple[bytes, str]]) -> tuple[str, bool]:
            digests, names = zip(*described, strict=True)
            if len(set(names)) > 1:
                raise CheckpointError("save", f"ranks save to {sorted(set(names))}.", "Save one step at a time.")
            save_id = uuid4().hex
            _begin(storage, target, save_id, is_ours, held)
            return save_id, len(set(digests)) == 1

        save_id, are_alike = council.agree(describe, begin)
        outlines = [outline] * council.size if are_alike else _all_outlines(council, outline)
        folder = _temporary(target, save_id)

        def write() -> list[Any]:
            plan = plan_save(outlines)[council.rank]
            metadata = {"format": FORMAT, "version": str(VERSION), "save_id": save_id}
            return write_items(storage, folder, council.rank, _items(tree, plan), metadata).to_plain()

        def commit(rows: list[list[Any]]) -> None:
            written = [Written.from_plain(row, file_name(rank)) for rank, row in enumerate(rows)]
            _commit(storage, folder, target, make_manifest(save_id, outlines, written))

        council.agree(write, commit)


def remove_leftovers(storage: Storage, parent: Path, is_ours: Callable[[str], bool]) -> None:
    """Remove the folders of saves that died; those of other living jobs stay."""
    found = [_TEMPORARY.fullmatch(name) for name in storage.names(parent)]
    folders = {match[0].removesuffix(HOLD_SUFFIX) for match in found if match is not None and is_ours(match[1])}
    for name in sorted(folders):
        storage.remove_unless_held(parent / name)


def remove_save(storage: Storage, folder: Path) -> None:
    """Remove a save so that, wherever this process dies, it is there as a whole or not at all."""
    dying = _temporary(folder, uuid4().hex)
    storage.move(folder, dying)
    storage.remove_folder(dying)


def _temporary(target: Path, save_id: str) -> Path:
    return target.with_name(f"{target.name}.tmp-{save_id}")


def _begin(storage: Storage, target: Path, save_id: str, is_ours: Callable[[str], bool], held: ExitStack) -> None:
    """On rank 0: make the temporary folder, to be removed when `held` closes unless it has been moved."""
    remove_leftovers(storage, target.parent, is_ours)
    if target.name in storage.names(target.parent):
        raise CheckpointError("save", f"{target} is there already.", "Save to a new place, or remove it first.")
    folder = _temporary(target, save_id)
    held.enter_context(storage.hold(folder))
    held.callback(_remove_if_there, storage, folder)
    storage.make_folder(folder)


def _remove_if_there(storage: Storage, folder: Path) -> None:
    try:
        if folder.name in storage.names(folder.parent):
            storage.remove_folder(folder)
    except OSError:  # the error that brought us here says more; the next save removes the folder
        pass


def _all_outlines(council: Council, outline: Outline) -> list[Outline]:
    """Everybody's outline, where they differ (ranks with different parts of a model)."""
    unique: list[Any]
    unique, places = council.agree(outline.to_plain, _shared)
    outlines = [Outline.from_plain(plain) for plain in unique]
    return [outlines[place] for place in places]


def _shared(plains: list[list[Any]]) -> tuple[list[Any], list[int]]:
    """Each different outline once, and which of them each rank has."""
    unique: list[Any] = []
    places: dict[bytes, int] = {}
    of_rank = []
    for plain in plains:
        place = places.setdefault(pack(plain), len(unique))
        if place == len(unique):
            unique.append(plain)
        of_rank.append(place)
    return unique, of_rank


def _items(tree: Tree, plan: RankPlan) -> list[Item]:
    values = {name: tree.leaves[name] for name in plan.values}
    items = [
        value_item(name, leaf.value if isinstance(leaf, PerRank | Value) else leaf) for name, leaf in values.items()
    ]
    for name, box in plan.parts:
        held = local_parts(tree.leaves[name])
        around = next(part for part in held if part.intersection(box) == box)
        items.append(Item(name, box, held[around][box.seen_from(around.origin).slices()]))
    return items


def make_manifest(save_id: str, outlines: Sequence[Outline], written: Sequence[Written]) -> Manifest:
    """What rank 0 writes down, from what each rank had and has written. Pure."""
    chunks: dict[str, list[Chunk]] = {}
    values: dict[str, Chunk] = {}
    per_rank: dict[str, dict[int, Chunk]] = {}
    own_values = {name for outline in outlines for name in outline.per_rank}
    for rank, by_rank in enumerate(written):
        for name, chunk in by_rank.parts:
            chunks.setdefault(name, []).append(chunk)
        for name, chunk in by_rank.values:
            if name in own_values:
                per_rank.setdefault(name, {})[rank] = chunk
            else:
                values[name] = chunk
    shardings = {name: sharding for outline in outlines for name, sharding in outline.tensors.items()}
    return Manifest(
        save_id=save_id,
        world_size=len(outlines),
        made_by=f"disttrain {__version__}, torch {torch.__version__}",
        files={file_name(rank): part.file for rank, part in enumerate(written) if part.file is not None},
        tensors={
            name: SavedTensor(
                sharding.shape, sharding.dtype, tuple(sorted(chunks.get(name, ()), key=lambda chunk: chunk.box))
            )
            for name, sharding in shardings.items()
        },
        values=values,
        per_rank=per_rank,
        same_as={name: first for outline in outlines for name, first in outline.same_as.items()},
    )


def _commit(storage: Storage, folder: Path, target: Path, manifest: Manifest) -> None:
    storage.write_file(folder / MANIFEST, [memoryview(encode(manifest))])
    storage.sync_folder(folder)
    storage.move(folder, target)
    storage.sync_folder(target.parent)
