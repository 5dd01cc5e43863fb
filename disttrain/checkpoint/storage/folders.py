"""Names the folders of saves, complete and in progress, and removes them. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from disttrain.checkpoint.format.manifest import MANIFEST, TORCH_METADATA
from disttrain.checkpoint.storage.base import HOLD_SUFFIX, Readable, Storage
from disttrain.checkpoint.storage.locks import UNNAMED

STEP = re.compile(r"step-(\d{8,})")
TEMPORARY = re.compile(rf"(.+)\.tmp-[0-9a-f]{{32}}(?:(?:{re.escape(UNNAMED)})?{re.escape(HOLD_SUFFIX)})?")
REPLACED = re.compile(r"(.+)\.was-[0-9a-f]{32}")
"""A whole save while another takes its place, see `storage/replacing.py`."""

CLAIM = re.compile(r"\.claim-(\d{6,})\.tmp-[0-9a-f]{32}")
"""The folder that a job that saves to a directory keeps there as long as it lives, see `storage/claims.py`."""


def steps(storage: Storage, directory: Path) -> dict[int, Path]:
    """The folders of the steps that were saved whole, ascending."""
    matches = [(match, directory / name) for name in storage.names(directory) if (match := STEP.fullmatch(name))]
    whole = {int(match[1]): folder for match, folder in matches if MANIFEST in storage.names(folder)}
    return dict(sorted(whole.items()))


def remove_leftovers(storage: Storage, parent: Path, is_ours: Callable[[str], bool]) -> None:
    """Remove the folders of saves that died; those of other living jobs stay."""
    settle_replaced(storage, parent, is_ours)
    matches = [TEMPORARY.fullmatch(name) for name in storage.names(parent)]
    leftovers = [match[0] for match in matches if match is not None and is_ours(match[1])]
    for name in sorted({name.removesuffix(HOLD_SUFFIX).removesuffix(UNNAMED) for name in leftovers}):
        storage.remove_unless_held(parent / name)


def remove_if_there(storage: Storage, folder: Path) -> None:
    """Removes a folder after an error, if it can: that error says more, and the next save or `gc` removes the rest."""
    with suppress(OSError):
        if folder.name in storage.names(folder.parent):
            storage.remove_folder(folder)


def settle_replaced(storage: Storage, parent: Path, is_ours: Callable[[str], bool]) -> None:
    """Settles saves that died while they replaced another: puts the other back, or removes it if the new one is
    complete."""
    for match in [REPLACED.fullmatch(name) for name in storage.names(parent)]:
        if match is None or not is_ours(match[1]):
            continue
        if match[1] in storage.names(parent):
            storage.remove_folder(set_aside(storage, parent / match[0], parent / match[1]))
        else:
            storage.move(parent / match[0], parent / match[1])


def standing(storage: Readable, folder: Path) -> Path:
    """The folder of the save that belongs at `folder`: there, or beside it where a save died that took its place."""
    if _is_save(storage, folder):
        return folder
    matches = [REPLACED.fullmatch(name) for name in storage.names(folder.parent)]
    beside = [folder.with_name(match[0]) for match in matches if match is not None and match[1] == folder.name]
    return next((candidate for candidate in beside if _is_save(storage, candidate)), folder)


def _is_save(storage: Readable, folder: Path) -> bool:
    return not {MANIFEST, TORCH_METADATA}.isdisjoint(storage.names(folder))


def set_aside(storage: Storage, folder: Path, target: Path | None = None) -> Path:
    """Take a save away by renaming it, so that it is there as a whole or not at all. Returns: what is to be removed.

    It is named as what a save to `target`, by default the folder itself, has left.
    """
    dying = temporary(target or folder, uuid4().hex)
    storage.move(folder, dying)
    return dying


def replaced(target: Path) -> Path:
    """A name for what lies at `target` while another save takes its place."""
    return target.with_name(f"{target.name}.was-{uuid4().hex}")


def temporary(target: Path, save_id: str) -> Path:
    return target.with_name(f"{target.name}.tmp-{save_id}")
