"""Copies the rings of processes that cannot dump to the dumps. Torch-free.

Rings are in the machine's own memory or on its own disk, dumps in the job's folder. While a job runs, that folder has a
link to each ring. When the job hangs or fails, the rings of processes that are gone, stopped or silent are copied
beside the links, with their state as the system tells it. At the end the launcher copies all that are left.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from disttrain.flight_recorder.dumps.private_file import replace_file
from disttrain.flight_recorder.dumps.rings.reader import Owner, ring_owner
from disttrain.flight_recorder.record.process.process_state import GONE, state_of
from disttrain.flight_recorder.record.ring import layout

MAX_AGE_S: Final = 2 * 86400.0
KEPT: Final = ".kept"
"""In the names of copies that were made while the job ran."""


def keep_silent(rings: Path, folder: Path, silent_s: float, job: str = "*") -> None:
    """Copy to `folder` what processes of `job` have in `rings` that are gone, stopped, or silent for `silent_s`.

    Raises OSError when `folder` cannot be written to.
    """
    for ring in rings.glob(f"*.{job}{layout.SUFFIX}"):
        owner = ring_owner(ring)
        if owner is None:
            continue
        state = state_of(owner.pid, owner.start, ring)
        if state or _is_silent(owner, silent_s):
            stem = f"{ring.name.removesuffix(layout.SUFFIX)}{KEPT}"
            _copy(ring, folder / f"{stem}{layout.SUFFIX}", layout.framed(("process", state)))
            _copy(ring.with_suffix(layout.STACKS_SUFFIX), folder / f"{stem}{layout.STACKS_SUFFIX}")


def remove_forgotten(rings: Path) -> None:
    """Removes the files that crashed processes left in `rings` days ago. Raises OSError when the folder is gone."""
    oldest_s = time.time() - MAX_AGE_S
    # Each process looks through them as it joins, and a day of killed jobs leaves hundreds: a Path for each would take
    # twice the time.
    with os.scandir(rings) as files:
        for file in files:
            try:
                is_old = file.name.endswith(layout.SUFFIX) and file.stat().st_mtime < oldest_s
            except FileNotFoundError:
                continue  # Another rank has removed it.
            if is_old and state_of(0, 0, ring := Path(file)) == GONE:
                ring.unlink(missing_ok=True)
                ring.with_suffix(layout.STACKS_SUFFIX).unlink(missing_ok=True)


def collect(rings: Path, folder: Path) -> None:
    """Move all that is left in `rings` to `folder`, in place of the links there. For when their processes are gone."""
    for file in [*rings.glob(f"*{layout.SUFFIX}"), *rings.glob(f"*{layout.STACKS_SUFFIX}")]:
        _copy(file, folder / file.name)
        file.unlink(missing_ok=True)


def collect_linked(rings: Path, folder: Path) -> None:
    """Copy what is left in `rings` to where links to it are: in `folder`, or one folder further down."""
    for link in [*folder.glob(f"*{layout.SUFFIX}"), *folder.glob(f"*/*{layout.SUFFIX}")]:
        if link.is_symlink() and (ring := link.readlink()).parent == rings:
            for suffix in (layout.SUFFIX, layout.STACKS_SUFFIX):
                _copy(ring.with_suffix(suffix), link.with_suffix(suffix))


def _is_silent(owner: Owner, silent_s: float) -> bool:
    # Without a watchdog nobody says that the process is alive.
    return owner.alive_ns > 0 and time.monotonic_ns() - owner.alive_ns > silent_s * 1e9


def _copy(source: Path, target: Path, more: bytes = b"") -> None:
    """Copies a ring; does nothing if `source` has just gone."""
    try:
        data = source.read_bytes()
    except FileNotFoundError:
        return
    replace_file(target, data + more)
