"""An analysis as text for people and as JSON for machines. Torch-free."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Iterable
from typing import Any

from disttrain.flight_recorder.analysis.analysis import Analysis
from disttrain.flight_recorder.analysis.verdict import Verdict
from disttrain.flight_recorder.record.record import ranks_text

_WIDTH = 110


def as_text(analysis: Analysis) -> str:
    """The verdicts with their evidence, the most probable cause first, then what they rest on."""
    blocks = [_verdict(number, verdict) for number, verdict in enumerate(analysis.verdicts, 1)]
    blocks.append("\n".join(_indented("", [*_basis(analysis), *(f"note: {note}" for note in analysis.notes)])))
    return _printable("\n\n".join(blocks))


def as_json(analysis: Analysis) -> str:
    """An object: `verdicts` (`kind`, `ranks`, `summary`, `evidence`, `cause`, `advice`), `dumps`, `notes`. ASCII."""
    content: dict[str, Any] = {
        "verdicts": [
            {
                "kind": verdict.kind.value,
                "ranks": verdict.ranks,
                "summary": verdict.summary,
                "evidence": verdict.evidence,
                "cause": verdict.cause,
                "advice": verdict.advice,
            }
            for verdict in analysis.verdicts
        ],
        "dumps": [
            {
                "rank": dump.rank,
                "world_size": dump.world_size,
                "job": dump.job,
                "host": dump.host,
                "pid": dump.pid,
                "reason": dump.reason,
                "dumped_s": dump.dumped_s,
                "num_records": len(dump.records),
                "versions": dump.versions,
            }
            for dump in analysis.dumps
        ],
        "notes": analysis.notes,
    }
    return json.dumps(content, indent=2)


def _verdict(number: int, verdict: Verdict) -> str:
    who = f": {ranks_text(verdict.ranks)}" if verdict.ranks else ""
    how = f" ({verdict.cause.value.replace('_', ' ')})" if verdict.cause else ""
    lines = [f"{number}. {verdict.kind.value.replace('_', ' ')}{who}{how}"]
    lines += _indented("   ", [verdict.summary])
    lines += _indented("   - ", verdict.evidence)
    lines += _indented("   next: ", [verdict.advice])
    return "\n".join(lines)


def _basis(analysis: Analysis) -> list[str]:
    dumps = analysis.dumps
    if not dumps:
        return []
    hosts = len({dump.host for dump in dumps})
    first_s, last_s = min(dump.dumped_s for dump in dumps), max(dump.dumped_s for dump in dumps)
    reasons = ", ".join(sorted({dump.reason for dump in dumps}))
    versions = sorted({", ".join(f"{name} {version}" for name, version in dump.versions.items()) for dump in dumps})
    text = f"{len(dumps)} of {dumps[0].world_size} ranks dumped, on {hosts} host{'s' if hosts > 1 else ''}, job "
    text += f"{dumps[0].job}, within {last_s - first_s:.1f} s until {_clock_text(last_s)} ({reasons})"
    return [text, *versions]


def _clock_text(time_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
    except (OverflowError, ValueError, OSError):  # a damaged dump may name any time
        return f"{time_s:.0f} s"


def _indented(first: str, sentences: Iterable[str]) -> list[str]:
    rest = " " * len(first)
    return [
        line
        for sentence in sentences
        for line in textwrap.wrap(
            sentence,
            _WIDTH,
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]


def _printable(text: str) -> str:
    """Without characters that a terminal would obey: names come from files that anybody may have written."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)
