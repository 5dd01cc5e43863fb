"""Folders of saves: how those of steps and those under way are named, and how they go. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from disttrain.checkpoint.locks import UNNAMED
from disttrain.checkpoint.manifest import MANIFEST
from disttrain.checkpoint.storage import HOLD_SUFFIX, Storage

STEP = re.compile(r"step-(\d{8,})")
TEMPORARY = re.compile(rf"(.+)\.tmp-[0-9a-f]{{32}}(?:(?:{re.escape(UNNAMED)})?{re.escape(HOLD_SUFFIX)})?")
CLAIM = re.compile(r"\.claim-(\d{6,})\.tmp-[0-9a-f]{32}")
"""What a job that saves to a directory leaves there as long as it lives, see `claims.py`."""


def steps(storage: Storage, directory: Path) -> dict[int, Path]:
    """The folders of the steps that were saved whole, ascending."""
    found = [(match, directory / name) for name in storage.names(directory) if (match := STEP.fullmatch(name))]
    whole = {int(match[1]): folder for match, folder in found if MANIFEST in storage.names(folder)}
    return dict(sorted(whole.items()))


def remove_leftovers(storage: Storage, parent: Path, is_ours: Callable[[str], bool]) -> None:
    """Remove the folders of saves that died; those of other living jobs stay."""
    found = [TEMPORARY.fullmatch(name) for name in storage.names(parent)]
    ours = [match[0] for match in found if match is not None and is_ours(match[1])]
    for name in sorted({name.removesuffix(HOLD_SUFFIX).removesuffix(UNNAMED) for name in ours}):
        storage.remove_unless_held(parent / name)


def set_aside(storage: Storage, folder: Path) -> Path:
    """Take a save away by renaming it, so that it is there as a whole or not at all. Returns: what is to be removed."""
    dying = temporary(folder, uuid4().hex)
    storage.move(folder, dying)
    return dying


def temporary(target: Path, save_id: str) -> Path:
    return target.with_name(f"{target.name}.tmp-{save_id}")
