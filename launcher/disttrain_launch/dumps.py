"""Where the flight recorders' dumps of a job go."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from disttrain import settings
from disttrain_launch.job import JobSpec

FOLDER = "flight"


def with_dump_folder(environ: Mapping[str, str], spec: JobSpec, own_folder: Path) -> dict[str, str]:
    """`environ` with a DISTTRAIN_FLIGHT_DIR: its own, else among the logs, else in the launcher's `own_folder`."""
    folder = settings.FLIGHT_DIR.read(environ) or (spec.logs.directory or own_folder) / FOLDER
    return {**environ, settings.FLIGHT_DIR.name: str(folder.absolute())}


def dump_folder(environ: Mapping[str, str], round: int) -> Path:
    """What `with_dump_folder` has set, or a folder in it: dumps of several rounds would contradict each other."""
    folder = settings.FLIGHT_DIR.read(environ)
    assert folder is not None, "launch sets it"
    return folder if round == 0 else folder / f"round-{round}"
