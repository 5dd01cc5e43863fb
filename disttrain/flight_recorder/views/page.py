"""An analysis as one page that needs nothing else: verdicts, a timeline of all ranks, who waits for whom, stacks.

All but the timeline is written here and can be read without scripts. Whatever comes from a dump is escaped, the script
puts texts in as texts, and the page's policy runs no script but its own and fetches nothing. Torch-free.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, Final

from disttrain.flight_recorder.analysis.alignment.match import match
from disttrain.flight_recorder.analysis.analysis import Analysis
from disttrain.flight_recorder.analysis.verdict import Kind, Verdict
from disttrain.flight_recorder.analysis.waiting.waits import find_waits
from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.dumps.private_file import private_file
from disttrain.flight_recorder.record.record import ranks_text
from disttrain.flight_recorder.views.data import timeline_data
from disttrain.flight_recorder.views.graph import boxes_of, draw_graph
from disttrain.flight_recorder.views.stacks import draw_stacks, stack_groups

_PARTS: Final = Path(__file__).parent / "page_parts"


def as_html(analysis: Analysis) -> str:
    """The page's text; ASCII only, so that no server's idea of letters can spoil it."""
    dumps = analysis.dumps
    matched = match(dumps)
    blamed = analysis.verdicts[0].ranks
    waits = find_waits(matched)
    boxes = boxes_of(waits, matched.dumps, blamed)
    style, script = _part("page.css"), _part("page.js")
    filled = {
        "policy": f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}",
        "title": escape(f"{_name(analysis.verdicts[0].kind)} · {dumps[0].job if dumps else 'no dumps'}"),
        "style": style,
        "basis": "".join(f"<li>{escape(fact)}</li>" for fact in _facts(dumps)),
        "verdicts": "".join(_verdict(verdict, is_first=not index) for index, verdict in enumerate(analysis.verdicts)),
        "notes": "".join(f"<li>{escape(note)}</li>" for note in analysis.notes),
        "graph": draw_graph(boxes) if boxes else '<p class="note">No rank waits for another.</p>',
        "stacks": draw_stacks(
            stack_groups(dumps, waits, blamed), [rank for rank in blamed if rank not in matched.dumps]
        ),
        "data": _data(timeline_data(dumps, matched.world_size, blamed)),
        "script": script,
    }
    pieces = _part("page.html").split("%%")
    # Every other piece is a name; what is filled in is not looked at again.
    text = "".join(filled[piece] if index % 2 else piece for index, piece in enumerate(pieces))
    return text.encode("ascii", "xmlcharrefreplace").decode()


def write_page(file: Path, analysis: Analysis) -> None:
    """Write `file` in one step, for its owner's eyes only. Raises FlightDumpError when that cannot be."""
    with private_file(file) as stream:
        stream.write(as_html(analysis))


def _verdict(verdict: Verdict, *, is_first: bool) -> str:
    kind = verdict.kind
    mood = "good" if kind is Kind.NOTHING_WRONG else "open" if kind is Kind.NOT_ENOUGH_DATA else "bad"
    who = f'<span class="who">{escape(ranks_text(verdict.ranks))}</span>' if verdict.ranks else ""
    evidence = "".join(f"<li>{escape(sentence)}</li>" for sentence in verdict.evidence)
    if evidence:
        evidence = (
            f"<details{' open' if is_first else ''}><summary>why we say so</summary><ul>{evidence}</ul></details>"
        )
    return (
        f'<article class="verdict {mood}{" first" if is_first else ""}"><h2>{escape(_name(kind))}{who}</h2>'
        f'<p class="summary">{escape(verdict.summary)}</p>'
        f'<p class="next"><b>Next</b>{escape(verdict.advice)}</p>{evidence}</article>'
    )


def _name(kind: Kind) -> str:
    return kind.value.replace("_", " ").capitalize()


def _facts(dumps: tuple[Dump, ...]) -> Iterator[str]:
    if not dumps:
        return
    yield f"job {dumps[0].job}"
    hosts = len({dump.host for dump in dumps})
    yield f"{len(dumps)} of {dumps[0].world_size} ranks, {hosts} host{'s' if hosts > 1 else ''}"
    yield _clock_text(max(dump.dumped_s for dump in dumps))
    yield from sorted({dump.reason for dump in dumps})[:3]
    versions = sorted({", ".join(f"{name} {version}" for name, version in dump.versions.items()) for dump in dumps})
    yield from versions[:3]


def _clock_text(time_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(time_s))
    except (OverflowError, ValueError, OSError):  # a damaged dump may name any time
        return f"{time_s:.0f} s"


def _part(name: str) -> str:
    return (_PARTS / name).read_text(encoding="ascii")


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _data(content: dict[str, Any]) -> str:
    """JSON in which nothing can end the element that it stands in."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
