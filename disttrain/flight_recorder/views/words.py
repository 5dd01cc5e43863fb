"""Short words for places that have little room: the page's boxes, the trace, a terminal's rows. Torch-free."""

from __future__ import annotations

from disttrain.flight_recorder.analysis.wording import user_stack
from disttrain.flight_recorder.dumps.dump import RING, Dump
from disttrain.flight_recorder.dumps.words import EXIT
from disttrain.flight_recorder.record.record import SEND, Record, Stack


def call_name(record: Record) -> str:
    """Such as `all_reduce #12 of dp`, without sizes and lines."""
    site = record.site
    end = "" if site.peer_rank is None else f" {'to' if site.operation == SEND else 'from'} {site.peer_rank}"
    return f"{site.operation} #{record.sequence}{end} of {site.group_name}"


def purpose(record: Record) -> str:
    """The purpose of a call, as far as somebody said: `stage 2 microbatch 5 F, layers.3`."""
    return ", ".join(filter(None, (record.action, record.module)))


def line_of(dump: Dump, stack: Stack) -> str:
    """`train.py:17`, the innermost line of the user's, without folders."""
    frames = user_stack(dump, stack)
    return f"{frames[0].file.rpartition('/')[2]}:{frames[0].line}" if frames else ""


def doing(dump: Dump) -> str:
    """The activity of the rank when it was dumped: `in Python at data.py:58 in load`."""
    if dump.failure is not None:
        return f"ended with {dump.failure.kind} at {_line_in(dump, dump.failure.stack)}"
    if dump.reason == RING:
        at = f", at {_line_in(dump, dump.main_stack)}" if dump.threads else ""
        return f"left no dump but its last records{at}"
    if dump.reason == EXIT:
        return "came to the end of its script"
    where = "in a collective" if dump.is_in_transport else "in Python"
    return f"{where} at {_line_in(dump, dump.main_stack)}"


def _line_in(dump: Dump, stack: Stack) -> str:
    frames = user_stack(dump, stack)
    return f"{line_of(dump, stack)} in {frames[0].function}" if frames else "an unknown place"


def printable(text: str) -> str:
    """Without characters that a terminal would obey: names come from files that anybody may have written."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def seconds_text(time_s: float) -> str:
    """`0.4 s`, `12 s`, `3 min 5 s`, `2 h 4 min`."""
    if time_s < 10:
        return f"{max(0.0, time_s):.1f} s"
    whole = round(time_s)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
