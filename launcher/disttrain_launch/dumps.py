"""The flight recorders' dumps: where workers write them, how they are asked for, and what they say at the end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from disttrain import settings
from disttrain.errors import FlightDumpError
from disttrain.flight_recorder.analysis import analyze
from disttrain.flight_recorder.dump import SUFFIX as DUMP_SUFFIX
from disttrain.flight_recorder.dump_reader import reason_of
from disttrain.flight_recorder.dump_words import END_REASONS, EXIT
from disttrain.flight_recorder.left_rings import collect, collect_linked, keep_silent
from disttrain.flight_recorder.process_state import has_handler, start_of
from disttrain.flight_recorder.record import ranks_text
from disttrain.flight_recorder.ring_layout import SUFFIX
from disttrain.flight_recorder.ring_reader import ring_owner
from disttrain.flight_recorder.verdict import Kind
from disttrain_launch.job import OPERATION, JobSpec
from disttrain_launch.outcome import Failed, Outcome

_FOLDER = "flight"
_RINGS = "rings"
_SILENT_S = 10.0
DUMP_S = 1.0
"""How long workers may take to dump."""


def with_dump_folder(environ: Mapping[str, str], spec: JobSpec, own_folder: Path, memory: Path) -> dict[str, str]:
    """`environ` with a DISTTRAIN_FLIGHT_DIR: its own, else among the logs, else in the launcher's `own_folder`.

    Those may lie on a network's file system. Rings are mapped into workers, and lie in `memory`, the launcher's, too.
    """
    folder = settings.FLIGHT_DIR.read(environ) or (spec.logs.directory or own_folder) / _FOLDER
    variables = {settings.FLIGHT_DIR.name: folder.absolute(), settings.FLIGHT_RING_DIR.name: memory / _RINGS}
    return {**environ, **{name: str(path) for name, path in variables.items()}}


def dump_folder(environ: Mapping[str, str], round: int) -> Path:
    """What `with_dump_folder` has set, or a folder in it: dumps of several rounds would contradict each other."""
    folder = settings.FLIGHT_DIR.read(environ)
    assert folder is not None, "launch sets it"
    return folder if round == 0 else folder / f"round-{round}"


def ask_for_dumps(environ: Mapping[str, str], folder: Path, sessions: set[int]) -> float:
    """Have the processes of these sessions that record dump. Returns: the seconds that they may take for it.

    Others would die of the signal: who records is known by its ring, and by when it was started, since numbers of
    processes are used again; one whose recorder cannot dump, or not yet, does not handle it. Of those that are gone or
    stopped already the rings are kept in `folder` as they are.
    """
    rings = _ring_folder(environ)
    _keep(keep_silent, rings, folder, _SILENT_S)
    is_asked = False
    for ring in rings.glob(f"*{SUFFIX}"):
        owner = ring_owner(ring)
        try:
            if owner is None or os.getsid(owner.pid) not in sessions or start_of(owner.pid) != owner.start:
                continue
            if has_handler(owner.pid, signal.SIGUSR2):
                os.kill(owner.pid, signal.SIGUSR2)
                is_asked = True
        except (ProcessLookupError, PermissionError):
            continue  # It is the ring of a process that is gone.
    return DUMP_S if is_asked else 0.0


def collect_rings(environ: Mapping[str, str], folder: Path) -> None:
    """What the workers of a round have left of their rings, to its dumps. For when they are gone."""
    _keep(collect, _ring_folder(environ), folder)


def collect_linked_rings(environ: Mapping[str, str]) -> None:
    """The same where the agent was killed, and nobody knows the round. Raises OSError."""
    folder = settings.FLIGHT_DIR.read(environ)
    assert folder is not None, "launch sets it"
    collect_linked(_ring_folder(environ), folder)


def _ring_folder(environ: Mapping[str, str]) -> Path:
    rings = settings.FLIGHT_RING_DIR.read(environ)
    assert rings is not None, "launch sets it"
    return rings


def _keep(keep: Callable[..., None], rings: Path, folder: Path, *more: float) -> None:
    try:
        keep(rings, folder, *more)
    except OSError as problem:  # such as a full disk
        print(f"{OPERATION}: flight recorder: rings cannot be copied to {folder}: {problem}", file=sys.stderr)


@dataclass(frozen=True)
class Story:
    """What dumps say: a text for the screen, and facts for the event log, without the words of workers' exceptions."""

    text: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)


def story(folder: Path, own_folder: Path, outcome: Outcome, spec: JobSpec, started_s: float) -> Story:
    """What the dumps of a job that failed say about why; empty when there are none since `started_s`.

    Dumps in the launcher's `own_folder` go with it, but not where they tell something or were made before the end.
    """
    if not folder.is_dir():
        return Story()
    found = _verdict(folder, spec, started_s) if isinstance(outcome, Failed) else Story()
    is_own = own_folder in folder.parents
    if not found.text and is_own and any(_is_of_the_run(dump) for dump in folder.glob(f"*{DUMP_SUFFIX}")):
        found = Story("there are dumps from while the job ran.")
    if not found.text:
        return found
    if is_own:
        folder = _kept(own_folder) / folder.relative_to(own_folder / _FOLDER)
    text = f"{OPERATION}: flight recorder: {found.text}\n    more: disttrain-flight {folder}\n"
    return Story(text, {**found.facts, "dumps": str(folder)})


def _kept(own_folder: Path) -> Path:
    """Move the dumps out of `own_folder`, to a place that others cannot read either. Returns: where they are."""
    dumps = own_folder / _FOLDER
    dumps.chmod(0o700)
    return dumps.rename(own_folder.with_name(f"disttrain-flight-{own_folder.name.rpartition('-')[2]}"))


def _verdict(folder: Path, spec: JobSpec, started_s: float) -> Story:
    try:
        analysis = analyze(folder)
    except FlightDumpError:
        return Story()
    verdict, dumps = analysis.verdicts[0], analysis.dumps
    if not any(dump.started_s >= started_s for dump in dumps) or verdict.kind is Kind.NOTHING_WRONG:
        return Story()
    if spec.num_nodes > 1 and len(dumps) < dumps[0].world_size:
        if all(dump.reason == EXIT for dump in dumps):
            return Story()  # Of this node all ranks have ended as they should.
        # Whoever lies elsewhere would be blamed for having left nothing.
        ranks = ranks_text(dump.rank for dump in dumps)
        return Story(f"of {ranks} only; put the dumps of all nodes into one folder.")
    return Story(verdict.summary, {"kind": verdict.kind, "ranks": verdict.ranks, "cause": verdict.cause})


def _is_of_the_run(dump: Path) -> bool:
    """True for what a rank has not written just because it ended."""
    try:
        return reason_of(dump) not in END_REASONS
    except FlightDumpError:
        return False
