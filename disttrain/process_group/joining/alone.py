"""A process that nobody launched, as in `python train.py` or in a notebook: the one rank of a job of its own.

torch's rules for `env://` hold as soon as one of its variables is set: what is missing then is an error. So is a task
of srun's or mpirun's that has siblings: each of them would train by itself, and nobody would notice.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from disttrain import settings
from disttrain.errors import RendezvousError
from disttrain.settings import Setting
from disttrain.store import FileStore

OF_A_JOB: Final[tuple[Setting[Any], ...]] = (
    settings.RANK,
    settings.WORLD_SIZE,
    settings.MASTER_ADDR,
    settings.MASTER_PORT,
    settings.STORE,
)
"""Variables by which a launcher tells a process its place."""

_FIRST_SPECIAL_STEP: Final = 0xFFFFFFF0
"""Slurm's numbers of batch scripts and interactive shells, which run one process by itself. Source: slurm.h."""


def is_alone(rank: int, world_size: int, environ: Mapping[str, str] | None) -> bool:
    """True where neither the arguments (-1: not given) nor the environment put this process into a job of several.

    Raises: RendezvousError in a task of srun or mpirun, unless `rank` and `world_size` are given.
    """
    is_said = (rank, world_size) == (0, 1)
    if not (is_said or rank == world_size == -1) or any(setting.is_set(environ) for setting in OF_A_JOB):
        return False
    if not is_said and (siblings := _siblings(environ)):
        problem = f"this process is one of {siblings}, and no launcher has set RANK and WORLD_SIZE."
        remedy = "Start disttrain-launch in its place, once on each node; or give rank=0, world_size=1."
        raise RendezvousError("init_process_group", problem, remedy)
    return True


def open_own(timeout_s: float) -> FileStore:
    """A store in a new temporary file, which goes with the store, or with the process.

    A file, since a process that writes checkpoints beside this one opens it, too.
    """
    descriptor, path = tempfile.mkstemp(prefix="disttrain-store-")
    os.close(descriptor)
    store = FileStore(path, 1, timeout_s)
    weakref.finalize(store, _remove, path, os.getpid())
    return store


def _remove(path: str, pid: int) -> None:
    if os.getpid() == pid:  # no fork of ours
        with suppress(OSError):
            Path(path).unlink(missing_ok=True)


def _siblings(environ: Mapping[str, str] | None) -> str:
    """In words, where there are some."""
    num_tasks, step = settings.SLURM_STEP_NUM_TASKS.read(environ), settings.SLURM_STEP_ID.read(environ)
    if num_tasks is not None and num_tasks > 1 and step is not None and step < _FIRST_SPECIAL_STEP:
        return f"{num_tasks} tasks of srun"
    for setting in (settings.OPEN_MPI_SIZE, settings.PMI_SIZE):
        size = setting.read(environ)
        if size is not None and size > 1:
            return f"{size} processes of mpirun"
    return ""
