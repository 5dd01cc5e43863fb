"""How calls, places and what a rank is doing are put into words. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from disttrain.flight_recorder.dump import Dump
from disttrain.flight_recorder.record import SEND, Frame, Record, Stack, State, ranks_text

_MAX_STACK_FRAMES = 8


def user_stack(dump: Dump, stack: Stack) -> Stack:
    """The frames of the user's own files; where there are none, those outside disttrain; else all."""
    outside = tuple(frame for frame in stack if not frame.file.startswith(dump.package))
    own = tuple(frame for frame in outside if not frame.file.startswith(dump.libraries))
    return own or outside or stack


def place(dump: Dump, stack: Stack) -> str:
    """The innermost line of the user's: `train.py:17 in step`."""
    frames = user_stack(dump, stack)
    return str(frames[0]) if frames else "an unknown place"


def call_text(record: Record) -> str:
    """Such as `all_reduce #12 of group world (float32[8])`."""
    site = record.site
    end = "" if site.peer_rank is None else f" {'to' if site.operation == SEND else 'from'} rank {site.peer_rank}"
    tensors = f" ({site.tensors})" if site.tensors else ""
    return f"{site.operation} #{record.sequence}{end} of group {site.group_name}{tensors}"


def waited_text(dump: Dump, record: Record) -> str:
    """How far this rank came with the call, and for how long it waited."""
    match record.state:
        case State.COMPLETED:
            return "which it completed"
        case State.FAILED:
            return f"which failed after {waited_s(dump, record):.1f} s: {record.error}"
        case State.ENQUEUED:
            return f"for {waited_s(dump, record):.1f} s when it was dumped"


def waited_s(dump: Dump, record: Record) -> float:
    """By the rank's own clock."""
    end_s = dump.dumped_s if record.completed_s is None else record.completed_s
    return max(0.0, end_s - record.enqueued_s)


def came_lines(dumps: Mapping[int, Dump], records: Mapping[int, Record]) -> list[str]:
    """A line for all ranks that came alike: what they called, where, and how long the longest of them waited."""
    alike: dict[tuple[str, str, State], list[int]] = {}
    for rank, record in sorted(records.items()):
        alike.setdefault((call_text(record), place(dumps[rank], record.site.stack), record.state), []).append(rank)
    lines = []
    for (call, where, _), ranks in alike.items():
        longest = max(ranks, key=lambda rank: waited_s(dumps[rank], records[rank]))
        lines.append(f"{ranks_text(ranks)}: {call} at {where}, {waited_text(dumps[longest], records[longest])}")
    return lines


def doing(dump: Dump) -> str:
    """What the rank was doing when it was dumped, as half a sentence: `it is in Python at train.py:33 in load`."""
    if dump.failure is not None:
        failure = dump.failure
        return f"it ended with {failure.kind} ({failure.message}) at {place(dump, failure.stack)}"
    if dump.reason == "exit":
        return "its script has come to its end"
    if dump.is_in_transport:
        return f"it is inside an operation that is not on record, perhaps connecting, at {place(dump, dump.main_stack)}"
    return f"it is in Python at {place(dump, dump.main_stack)}"


def stack_line(dump: Dump) -> str:
    """The main thread's stack, or the exception's, on one line, innermost first; the user's own frames only."""
    stack = dump.failure.stack if dump.failure is not None else dump.main_stack
    frames = user_stack(dump, stack)[:_MAX_STACK_FRAMES]
    return f"stack of rank {dump.rank}, innermost first: {_joined(frames)}"


def _joined(frames: Iterable[Frame]) -> str:
    return " < ".join(map(str, frames)) or "unknown"
