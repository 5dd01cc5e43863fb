"""Chooses the folders of a job's flight recorder dumps and rings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from disttrain import settings
from disttrain_launch.request.job import JobSpec

FOLDER = "flight"
_RINGS = "rings"


def with_dump_folder(environ: Mapping[str, str], spec: JobSpec, own_folder: Path, memory: Path) -> dict[str, str]:
    """`environ` with a DISTTRAIN_FLIGHT_DIR: its own, else among the logs, else in the launcher's `own_folder`.

    Those may lie on a network's file system. Rings are mapped into workers, and lie in `memory`, the launcher's, too.
    """
    folder = settings.FLIGHT_DIR.read(environ) or (spec.logs.directory or own_folder) / FOLDER
    variables = {settings.FLIGHT_DIR.name: folder.absolute(), settings.FLIGHT_RING_DIR.name: memory / _RINGS}
    return {**environ, **{name: str(path) for name, path in variables.items()}}


def dump_folder(environ: Mapping[str, str], round: int) -> Path:
    """The folder that `with_dump_folder` has set, or one in it: dumps of several rounds would contradict each other."""
    folder = settings.FLIGHT_DIR.read(environ)
    assert folder is not None, "launch sets it"
    return folder if round == 0 else folder / f"round-{round}"


def ring_folder(environ: Mapping[str, str]) -> Path:
    """The folder that `with_dump_folder` has set; it is there when a worker has recorded."""
    rings = settings.FLIGHT_RING_DIR.read(environ)
    assert rings is not None, "launch sets it"
    return rings
