"""Shows a running job from the rings of its ranks: each rank's last call, for how long it is in it, and for whom it
waits.

The ranks take no part: their rings are files. Ranks in the same state are one row. Torch-free.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from disttrain.errors import FlightDumpError
from disttrain.flight_recorder.analysis.alignment.match import match
from disttrain.flight_recorder.analysis.waiting.wait_graph import Wait
from disttrain.flight_recorder.analysis.waiting.waits import find_waits
from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.dumps.expanding import expanded
from disttrain.flight_recorder.dumps.rings.reader import read_ring
from disttrain.flight_recorder.record.record import State, ranks_text
from disttrain.flight_recorder.record.ring.layout import SUFFIX
from disttrain.flight_recorder.views.data import shift_s
from disttrain.flight_recorder.views.words import call_name, line_of, purpose, seconds_text

SILENT_S: Final = 20.0
"""If the watchdog of a rank gives no sign of life for this long, the rank holds the interpreter's lock, is stopped, or
its node is dead."""
_MAX_NAMED: Final = 3


@dataclass(frozen=True)
class Row:
    """Ranks that are alike: their last call, where, how it stands, for how long, and whom they wait for.

    `is_held_up` when they wait for others, or give no sign of life.
    """

    ranks: tuple[int, ...]
    call: str
    line: str
    purpose: str
    state: str
    since_s: float
    waits_for: str
    is_held_up: bool


@dataclass(frozen=True)
class Sight:
    """A job at one moment: `waits` says in a sentence who holds up whom; empty when nobody does."""

    job: str
    world_size: int
    num_seen: int
    rows: tuple[Row, ...]
    waits: tuple[str, ...]
    notes: tuple[str, ...]


def look(folder: Path, now_s: float | None = None) -> Sight | None:
    """The job in `folder` whose ranks have begun last; None when there are no rings that can be read.

    Raises: FlightDumpError when the folder cannot be listed.
    """
    now_s = time.time() if now_s is None else now_s
    notes: list[str] = []
    rings = _rings(folder, notes)
    if not rings:
        return None
    newest = max(rings, key=lambda dump: dump.started_s)
    seen = sorted((dump for dump in rings if dump.job == newest.job), key=lambda dump: dump.rank)
    host = socket.gethostname()
    # This machine's clock, turned into rank 0's by what a rank on it has found out.
    own_shift_s = next((shift_s(dump) for dump in seen if dump.host == host), 0.0)
    last_sign_s = {dump.rank: dump.dumped_s for dump in seen}
    current = {dump.rank: replace(dump, dumped_s=now_s + own_shift_s - shift_s(dump)) for dump in seen}
    signs = {rank: _sign(dump, last_sign_s[rank], host) for rank, dump in current.items()}
    waits = find_waits(match(tuple(current.values())))
    rows = _rows(list(current.values()), waits, signs)
    return Sight(newest.job, newest.world_size, len(seen), tuple(rows), tuple(_sentences(waits, current)), tuple(notes))


def _rings(folder: Path, notes: list[str]) -> list[Dump]:
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix == SUFFIX)
    except (OSError, ValueError) as error:
        problem = f"{str(folder)!r} cannot be opened: {getattr(error, 'strerror', None) or error}."
        raise FlightDumpError("disttrain-flight watch", problem, "Name the DISTTRAIN_FLIGHT_DIR of the job.") from None
    rings = []
    for file in files:
        try:
            rings.append(expanded(read_ring(file)))
        except FlightDumpError as error:
            notes.append(error.problem)  # Also when its process has just ended, and the file with it.
    return rings


def _sign(dump: Dump, last_sign_s: float, host: str) -> str:
    """Empty for a rank that is alive."""
    if dump.host == host and not _is_alive(dump.pid):
        return "process is gone"
    silent_s = dump.dumped_s - last_sign_s
    return f"no sign for {seconds_text(silent_s)}" if silent_s >= SILENT_S else ""


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _rows(dumps: Sequence[Dump], waits: Sequence[Wait], signs: dict[int, str]) -> list[Row]:
    for_ranks: dict[int, tuple[int, ...]] = {}
    for wait in waits:
        for_ranks[wait.rank] = tuple(sorted({*for_ranks.get(wait.rank, ()), *wait.for_ranks}))
    alike: dict[tuple[str, str, str, str, str], list[tuple[int, float]]] = {}
    for dump in dumps:
        *texts, since_s = _last_call(dump)
        whom = ranks_text(for_ranks[dump.rank]) if for_ranks.get(dump.rank) else ""
        call, line, label, state = texts
        key = (call, line, label, signs[dump.rank] or state, whom)
        alike.setdefault(key, []).append((dump.rank, since_s))
    rows = [
        Row(
            tuple(rank for rank, _ in rank_times),
            *(call, line, label, state),
            since_s=max(since_s for _, since_s in rank_times),
            waits_for=whom,
            is_held_up=bool(whom) or any(signs[rank] for rank, _ in rank_times),
        )
        for (call, line, label, state, whom), rank_times in alike.items()
    ]
    return sorted(rows, key=lambda row: (not row.is_held_up, row.ranks))


def _last_call(dump: Dump) -> tuple[str, str, str, str, float]:
    """Call, line, purpose, state, and for how long it has been so: in the call, or outside since it ended."""
    if not dump.records:
        return "", "", "", "has called nothing yet", dump.dumped_s - dump.started_s
    record = dump.records[-1]
    texts = call_name(record), line_of(dump, record.site.stack), purpose(record)
    if record.completed_s is None:
        return *texts, "in it", dump.dumped_s - record.enqueued_s
    return *texts, "failed" if record.state is State.FAILED else "done", dump.dumped_s - record.completed_s


def _sentences(waits: Sequence[Wait], dumps: dict[int, Dump]) -> list[str]:
    alike: dict[tuple[str, tuple[int, ...]], list[Wait]] = {}
    for wait in waits:
        alike.setdefault((call_name(wait.record), wait.for_ranks), []).append(wait)
    sentences = []
    for (call, others), alike_waits in list(alike.items())[:_MAX_NAMED]:
        since_s = max(dumps[wait.rank].dumped_s - wait.record.enqueued_s for wait in alike_waits)
        verb = "waits" if len({wait.rank for wait in alike_waits}) == 1 else "wait"
        whom = f"for {ranks_text(others)}" if others else "though all have come"
        who = ranks_text(wait.rank for wait in alike_waits)
        sentences.append(f"{who} {verb} {whom} in {call}, for {seconds_text(since_s)}")
    if len(alike) > _MAX_NAMED:
        sentences.append(f"and {len(alike) - _MAX_NAMED} more calls that do not end")
    return sentences
