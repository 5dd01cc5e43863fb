"""The flight recorders' dumps: where workers write them, how they are asked for, and what they say at the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

from disttrain import settings
from disttrain.errors import FlightDumpError
from disttrain.flight_recorder.analysis import analyze
from disttrain.flight_recorder.ring_layout import SUFFIX
from disttrain.flight_recorder.ring_reader import ring_owner
from disttrain.flight_recorder.verdict import Kind
from disttrain_launch.job import OPERATION, JobSpec
from disttrain_launch.outcome import Failed, Outcome

DUMP_S = 1.0
"""How long workers may take to dump."""


def dump_folder(environ: Mapping[str, str], spec: JobSpec, round: int) -> Path | None:
    """What DISTTRAIN_FLIGHT_DIR says, else a folder among the logs; None where no logs are kept.

    A round after the first has a folder in it: dumps of several rounds would contradict each other.
    """
    folder = settings.FLIGHT_DIR.read(environ)
    if folder is None and spec.logs.directory is not None:
        folder = spec.logs.directory / "flight"
    return folder if folder is None or round == 0 else folder / f"round-{round}"


def ask_for_dumps(folder: Path, sessions: set[int]) -> float:
    """Have the processes of these sessions that record dump. Returns: the seconds that they may take for it.

    Others would die of the signal: who records is known by its ring.
    """
    is_asked = False
    for ring in folder.glob(f"*{SUFFIX}"):
        try:
            pid = ring_owner(ring)
            if pid is not None and os.getsid(pid) in sessions:
                os.kill(pid, signal.SIGUSR2)
                is_asked = True
        except (ProcessLookupError, PermissionError):
            continue  # It is the ring of a process that is gone.
    return DUMP_S if is_asked else 0.0


def verdict_text(folder: Path | None, outcome: Outcome, started_s: float) -> str:
    """What the dumps of a job that failed say about why; empty when there are none since `started_s`."""
    if folder is None or not isinstance(outcome, Failed) or not folder.is_dir():
        return ""
    try:
        analysis = analyze(folder)
    except FlightDumpError:
        return ""
    verdict = analysis.verdicts[0]
    if not any(dump.started_s >= started_s for dump in analysis.dumps) or verdict.kind is Kind.NOTHING_WRONG:
        return ""
    return f"{OPERATION}: flight recorder: {verdict.summary}\n    more: disttrain-flight {folder}\n"
