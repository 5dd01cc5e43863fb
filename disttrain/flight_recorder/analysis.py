"""From a folder of dumps to an analysis: which files can be used, which job they are of, what the verdicts are.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from disttrain.errors import FlightDumpError
from disttrain.flight_recorder.dump import SUFFIX, Dump, read_dump
from disttrain.flight_recorder.judge import judge
from disttrain.flight_recorder.match import match
from disttrain.flight_recorder.verdict import Verdict


@dataclass(frozen=True)
class Analysis:
    """The verdicts, the most probable cause first; the dumps that they rest on, by rank; notes on what was left out."""

    verdicts: tuple[Verdict, ...]
    dumps: tuple[Dump, ...]
    notes: tuple[str, ...]


def analyze(path: Path) -> Analysis:
    """Analyze the newest job that has dumps in the folder `path`; or the one dump in the file `path`.

    Raises: FlightDumpError when `path` is not there or cannot be listed.
    """
    read, notes = _read(path)
    chosen = _newest_job(read, notes)
    dumps = _one_for_each_rank(chosen, notes)
    return Analysis(tuple(judge(match(dumps))), tuple(dumps), tuple(notes))


def _read(path: Path) -> tuple[list[Dump], list[str]]:
    dumps, notes, num_foreign = [], [], 0
    for file in _files(path):
        if not file.name.endswith(SUFFIX) or file.name.startswith("."):
            num_foreign += 1
            continue
        try:
            dump = read_dump(file)
        except FlightDumpError as error:
            notes.append(f"not used: {error.problem}")
            continue
        notes += [f"{file.name} {problem}" for problem in dump.problems]
        if dump.problems and not dump.records:
            notes.append(f"not used: {file.name} has no records")
            continue
        dumps.append(dump)
    if num_foreign:
        notes.append(f"{num_foreign} other files are no dumps (*{SUFFIX})")
    return dumps, notes


def _files(path: Path) -> list[Path]:
    try:
        return (
            sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path.resolve(strict=True)]
        )
    except (OSError, ValueError) as error:
        problem = f"{str(path)!r} cannot be opened: {getattr(error, 'strerror', None) or error}."
        raise FlightDumpError("disttrain-flight", problem, "Name the folder with the dumps.") from None


def _newest_job(dumps: Sequence[Dump], notes: list[str]) -> list[Dump]:
    """A folder may hold dumps of earlier worlds too: the one that a rank joined last counts."""
    if not dumps:
        return []
    newest = max(dumps, key=lambda dump: dump.started_s)
    key = (newest.job, newest.world_size)
    chosen = [dump for dump in dumps if (dump.job, dump.world_size) == key]
    if len(chosen) < len(dumps):
        notes.append(f"{len(dumps) - len(chosen)} dumps are of other jobs than {newest.job}, the newest")
    return chosen


def _one_for_each_rank(dumps: Sequence[Dump], notes: list[str]) -> list[Dump]:
    latest: dict[int, Dump] = {}
    for dump in sorted(dumps, key=lambda dump: dump.dumped_s):
        if dump.rank in latest:
            notes.append(f"rank {dump.rank} has several dumps; the latest counts")
        latest[dump.rank] = dump
    return [latest[rank] for rank in sorted(latest)]
