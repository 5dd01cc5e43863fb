"""Folders for rings and dumps when DISTTRAIN_FLIGHT_DIR names none. Torch-free."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

NUM_KEPT_JOBS: Final = 5
"""The number of failed jobs whose dumps a user's private folder keeps."""


def private_folder() -> Path:
    """The folder of this user alone on this machine; it need not exist."""
    return Path(tempfile.gettempdir(), f"disttrain-flight-{os.getuid()}")


def made_private_folder() -> Path:
    """The same, which is there now. Raises OSError when it is another's."""
    folder = private_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "is not this user's alone", str(folder))
    return folder


def keep_dumps(dumps: Path, job: str) -> Path:
    """Move a job's folder `dumps` into the private folder, and let go of the oldest jobs there. Returns: where it is.

    Raises OSError when the private folder is another's.
    """
    target = made_private_folder() / job
    dumps.chmod(0o700)
    shutil.move(dumps, target)
    os.utime(target)
    jobs = sorted(_jobs(target.parent), reverse=True)
    for _, folder in jobs[NUM_KEPT_JOBS:]:
        # Another job's launcher may be removing it as well.
        shutil.rmtree(folder, ignore_errors=True)
    return target


def _jobs(folder: Path) -> list[tuple[float, Path]]:
    with os.scandir(folder) as entries:
        return [(entry.stat().st_mtime, Path(entry)) for entry in entries if entry.is_dir(follow_symlinks=False)]
