"""Analyses a folder of dumps: which files can be used, which job they are of, what the verdicts are.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from disttrain.errors import FlightDumpError
from disttrain.flight_recorder.analysis.alignment.match import match
from disttrain.flight_recorder.analysis.judge import judge
from disttrain.flight_recorder.analysis.verdict import Verdict
from disttrain.flight_recorder.dumps.dump import RING, SUFFIX, Dump
from disttrain.flight_recorder.dumps.expanding import expanded
from disttrain.flight_recorder.dumps.reading.reader import read_dump
from disttrain.flight_recorder.dumps.reading.shared_values import Shared
from disttrain.flight_recorder.dumps.rings.reader import read_ring
from disttrain.flight_recorder.dumps.torch_dump import TorchDump, as_dumps, may_be_torch_dump, read_torch_dump
from disttrain.flight_recorder.record.columns import Records
from disttrain.flight_recorder.record.record import Record
from disttrain.flight_recorder.record.replays import Replay
from disttrain.flight_recorder.record.ring.layout import STACKS_SUFFIX
from disttrain.flight_recorder.record.ring.layout import SUFFIX as RING_SUFFIX

_IN_LOGS = "flight"
"""The launcher's --log-dir has the dumps in it."""


@dataclass(frozen=True)
class Analysis:
    """The verdicts, the most probable cause first; the dumps that they rest on, by rank; notes on what was left out."""

    verdicts: tuple[Verdict, ...]
    dumps: tuple[Dump, ...]
    notes: tuple[str, ...]


def analyze(path: Path, job: str | None = None) -> Analysis:
    """Analyze `job` (None: the newest) of those with dumps in the folder `path`; or the one dump in the file `path`.

    A folder of logs may be given instead of the folder of dumps in it.

    Raises: FlightDumpError when `path` is not there or cannot be listed.
    """
    read, notes = _read([file for file in _files(path) if job is None or f".{job}." in file.name])
    chosen = _newest_job(read, notes)
    dumps = [expanded(dump) for dump in _dump_of_each_rank(chosen, notes)]
    return Analysis(tuple(judge(match(dumps))), tuple(dumps), tuple(notes))


def _last_s(dump: Dump) -> float:
    calls: list[Record | Replay] = [*dump.records, *dump.replays]
    return max((max(call.enqueued_s, call.completed_s or 0.0) for call in calls), default=0.0)


def _read(files: Sequence[Path]) -> tuple[list[Dump], list[str]]:
    dumps: list[Dump] = []
    notes: list[str] = []
    of_torch: list[TorchDump] = []
    num_foreign, shared = 0, Shared()
    for file in files:
        if file.suffix == STACKS_SUFFIX:
            continue  # read with its ring
        is_ours = file.suffix in (SUFFIX, RING_SUFFIX)
        if file.name.startswith(".") or not (is_ours or may_be_torch_dump(file)):
            num_foreign += 1
            continue
        try:
            if not is_ours:
                of_torch.append(read_torch_dump(file))
                continue
            dump = read_dump(file, shared) if file.suffix == SUFFIX else read_ring(file, shared)
        except FlightDumpError as error:
            notes.append(f"not used: {error.problem}")
            continue
        notes += [f"{file.name} {problem}" for problem in dump.problems]
        if dump.problems and not dump.records and not dump.replays:
            notes.append(f"not used: {file.name} has no records")
            continue
        dumps.append(dump)
    if num_foreign:
        others = "1 other file is no dump" if num_foreign == 1 else f"{num_foreign} other files are no dumps"
        notes.append(f"{others} (*{SUFFIX}, *{RING_SUFFIX}, nccl_trace_rank_*)")
    for dump in as_dumps(of_torch, notes):
        notes += [f"torch's dump of rank {dump.rank} {problem}" for problem in dump.problems]
        dumps.append(_in_columns(dump))
    return dumps, notes


def _in_columns(dump: Dump) -> Dump:
    """The same dump in less memory."""
    return replace(dump, records=Records.of(dump.records))


def _files(path: Path) -> list[Path]:
    try:
        if not path.is_dir():
            return [path.resolve(strict=True)]
        files = sorted(file for file in path.iterdir() if file.is_file())
        is_of_logs = not any(file.suffix in (SUFFIX, RING_SUFFIX) for file in files) and (path / _IN_LOGS).is_dir()
        return _files(path / _IN_LOGS) if is_of_logs else files
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


def _dump_of_each_rank(dumps: Sequence[Dump], notes: list[str]) -> list[Dump]:
    latest: dict[int, Dump] = {}
    for dump in sorted(dumps, key=lambda dump: dump.dumped_s):
        if dump.rank in latest and RING not in (dump.reason, latest[dump.rank].reason):
            notes.append(f"rank {dump.rank} has several dumps; the latest counts")
        # A ring says less than a dump, unless the rank has made calls since the dump.
        if dump.reason != RING or dump.rank not in latest or _last_s(dump) > latest[dump.rank].dumped_s:
            latest[dump.rank] = dump
    return [latest[rank] for rank in sorted(latest)]
