"""Analyzes the flight recorders' dumps of a job that failed, for its last words.

Only such a job loads this, and the analyzer with it: it would be a third of what a launcher loads.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from disttrain.errors import FlightDumpError
from disttrain.flight_recorder.analysis.analysis import analyze
from disttrain.flight_recorder.analysis.verdict import Kind
from disttrain.flight_recorder.dumps.dump import SUFFIX as DUMP_SUFFIX
from disttrain.flight_recorder.dumps.folders import keep_dumps
from disttrain.flight_recorder.dumps.reading.reader import reason_of
from disttrain.flight_recorder.dumps.words import END_REASONS, EXIT
from disttrain.flight_recorder.record.record import ranks_text
from disttrain_launch.output.failure.dump_exchange import unpack
from disttrain_launch.request.job import OPERATION, JobSpec
from disttrain_launch.workers.dumps import FOLDER
from disttrain_launch.workers.outcome import Failed, Outcome


@dataclass(frozen=True)
class Story:
    """The verdict: text for the screen, and facts for the event log, without the words of workers' exceptions."""

    text: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)


def story(
    folder: Path,
    own_folder: Path,
    others: Sequence[bytes],
    outcome: Outcome,
    spec: JobSpec,
    started_s: float,
    *,
    is_over: bool,
) -> Story:
    """Says from the dumps of a failed job why it failed; empty when there are none since `started_s`.

    Dumps in the launcher's `own_folder` go with it, but not where they tell something or were made before the end.
    Those of a round that another follows stay there until the job `is_over`. `others` are dumps of other nodes.
    """
    for packed in others:
        try:
            unpack(packed, folder)
        except (OSError, ValueError) as problem:
            print(f"{OPERATION}: flight recorder: dumps of another node cannot be kept: {problem}", file=sys.stderr)
    verdict = _verdict(folder, spec, started_s) if isinstance(outcome, Failed) else Story()
    is_own = own_folder in folder.parents
    if not verdict.text and is_own and is_over and any(_is_of_the_run(dump) for dump in folder.glob(f"*{DUMP_SUFFIX}")):
        verdict = Story("there are dumps from while the job ran.")
    if not verdict.text:
        return verdict
    text = f"{OPERATION}: flight recorder: {verdict.text}\n"
    if is_own and not is_over:
        return Story(text, verdict.facts)
    if is_own:
        dumps = own_folder / FOLDER
        try:
            folder = keep_dumps(dumps, own_folder.name.rpartition("-")[2]) / folder.relative_to(dumps)
        except OSError as problem:
            return Story(f"{text}    its dumps cannot be kept: {problem}\n", verdict.facts)
    return Story(f"{text}    more: disttrain-flight {folder}\n", {**verdict.facts, "dumps": str(folder)})


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
        return Story(f"of {ranks} only; the dumps of other nodes did not come.")
    return Story(verdict.summary, {"kind": verdict.kind, "ranks": verdict.ranks, "cause": verdict.cause})


def _is_of_the_run(dump: Path) -> bool:
    """True for what a rank has not written just because it ended."""
    try:
        return reason_of(dump) not in END_REASONS
    except FlightDumpError:
        return False
