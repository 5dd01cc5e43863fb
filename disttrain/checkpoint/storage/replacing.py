"""Puts a save in the place of the one before: in one step, or so that one of the two is always found. Torch-free.

Where two folders can be exchanged in one step, they are. Elsewhere the old save is renamed to `NAME.was-ID`, complete.
If the new save dies before it has its name, the old one stays there: a load of NAME finds it (`folders.standing`), and
the next save puts it back. If something other than a save is at NAME, it is unchanged, and the save is refused.
"""

from __future__ import annotations

import re
from pathlib import Path

from disttrain.checkpoint.format.manifest import MANIFEST, TABLES, TORCH_METADATA
from disttrain.checkpoint.storage.base import Exchanging, Storage
from disttrain.checkpoint.storage.folders import replaced, set_aside
from disttrain.errors import CheckpointError

_OF_SAVES = re.compile(
    rf"rank-\d{{5,}}\.safetensors|{re.escape(MANIFEST)}|{re.escape(TABLES)}|{re.escape(TORCH_METADATA)}(\.tmp)?|__.*\.distcp"
    r"|model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|shard-.*\.safetensors"
)
"""Files of our saves and of those formats that we write."""


def check_room(storage: Storage, path: Path, *, overwrites: bool) -> None:
    """Raises CheckpointError when a save may not take the name `path`."""
    if path.name not in storage.names(path.parent):
        return
    if not overwrites:
        raise CheckpointError(
            "save", f"{path} is there already.", "Save to a new place, remove it first, or say overwrite=True."
        )
    names = storage.names(path)
    others = [name for name in names if not _OF_SAVES.fullmatch(name)]
    if others:
        problem = f"{path} has {others[0]!r}, which is no save's: it would be lost."
        raise CheckpointError("save", problem, "Save to a folder of its own, such as one within it.")
    if not names and _is_file(storage, path):
        raise CheckpointError("save", f"{path} is a file.", "Save to another place, or remove it first.")


def put_in_place(storage: Storage, new: Path, path: Path, *, overwrites: bool) -> None:
    """Give the whole save `new` the name `path`, durably. What was there is at `new` then, or gone."""
    is_free = path.name not in storage.names(path.parent)
    if not is_free:
        check_room(storage, path, overwrites=overwrites)
        if isinstance(storage, Exchanging) and storage.exchange(new, path):
            storage.sync_folder(path.parent)
            return
    old = replaced(path)
    if not is_free:
        storage.move(path, old)
        storage.sync_folder(path.parent)
    try:
        storage.move(new, path)
    except OSError:
        if not is_free:
            storage.move(old, path)
        raise
    storage.sync_folder(path.parent)
    if not is_free:
        storage.remove_folder(set_aside(storage, old, path))


def _is_file(storage: Storage, path: Path) -> bool:
    try:
        with storage.open_file(path):
            return True
    except OSError:
        return False
