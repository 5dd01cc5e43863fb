"""Puts calls, lines of code and what a rank is doing into words. Torch-free."""

from __future__ import annotations

import textwrap
from collections.abc import Hashable, Iterable, Mapping

from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.record.record import SEND, Frame, Record, Stack, State, ranks_text

_MAX_STACK_FRAMES = 8
_MAX_ERROR_CHARS = 200


def outside(dump: Dump, stack: Stack) -> Stack:
    """The frames outside disttrain."""
    return tuple(frame for frame in stack if not frame.file.startswith(dump.package))


def user_stack(dump: Dump, stack: Stack) -> Stack:
    """The frames of the user's own files; where there are none, those outside disttrain; else all."""
    others = outside(dump, stack)
    user_frames = tuple(frame for frame in others if not frame.file.startswith(dump.libraries))
    return user_frames or others or stack


def location(dump: Dump, stack: Stack) -> str:
    """The innermost line of the user's: `train.py:17 in step`."""
    frames = user_stack(dump, stack)
    return str(frames[0]) if frames else "an unknown place"


def call_text(record: Record) -> str:
    """Such as `all_reduce #12 of group world (float32[8]) for layers.0 in replay 3 of step graph 1`."""
    site = record.site
    end = "" if site.peer_rank is None else f" {'to' if site.operation == SEND else 'from'} rank {site.peer_rank}"
    tensors = f" ({site.tensors})" if site.tensors else ""
    purpose = " ".join(filter(None, (record.action, record.module)))
    purpose = f" for {purpose}" if purpose else ""
    purpose += f" in {record.replay}" if record.replay else ""
    return f"{site.operation} #{record.sequence}{end} of group {site.group_title}{tensors}{purpose}"


def calls_text(record: Record, num_others: int) -> str:
    """The same, of a call which ranks made in so many other groups too, as along an axis of a mesh."""
    if not num_others:
        return call_text(record)
    return f"{call_text(record)} and those of {num_others} other group{'s' if num_others > 1 else ''}"


def waited_text(dump: Dump, record: Record) -> str:
    """The progress of this rank with the call, and how long it waited."""
    if record.is_queued:
        return f"to which its device had not come {dump.dumped_s - record.enqueued_s:.1f} s later"
    match record.state:
        case State.COMPLETED:
            return "which it completed"
        case State.FAILED:
            error = textwrap.shorten(record.error or "it did not say why", _MAX_ERROR_CHARS, placeholder=" ...")
            return f"which failed after {waited_s(dump, record):.1f} s: {error}"
        case State.ENQUEUED | State.CONNECTING:
            purpose = " for others to connect" if record.state is State.CONNECTING else ""
            return f"for {waited_s(dump, record):.1f} s{purpose} when it was dumped"
        case State.ON_DEVICE if record.device is None:
            return f"queued on its device {waited_s(dump, record):.1f} s before it was dumped"
        case State.ON_DEVICE:
            return f"in it on its device for {waited_s(dump, record):.1f} s when it was dumped"


def waited_s(dump: Dump, record: Record) -> float:
    """The wait by the rank's own clock: its device's, where that is known, else its host's."""
    began_s, ended_s = record.times_s
    return max(0.0, (dump.dumped_s if ended_s is None else ended_s) - began_s)


def arrival_lines(dumps: Mapping[int, Dump], records: Mapping[int, Record]) -> list[str]:
    """A line for all ranks that came alike: what they called, where, and how long the longest of them waited."""
    # First by what texts are made of, since each takes longer than all else, then by the texts.
    same: dict[tuple[Hashable, ...], list[int]] = {}
    for rank, record in sorted(records.items()):
        dump, called = dumps[rank], (id(record.site), record.sequence, record.action, record.module)
        key = (*called, dump.package, dump.libraries, record.state, record.is_queued)
        same.setdefault(key, []).append(rank)
    alike: dict[tuple[str, str, State, bool], list[int]] = {}
    for ranks in same.values():
        record = records[ranks[0]]
        where = location(dumps[ranks[0]], record.site.stack)
        alike.setdefault((call_text(record), where, record.state, record.is_queued), []).extend(ranks)
    lines = []
    for (call, where, *_), ranks in alike.items():
        longest = max(sorted(ranks), key=lambda rank: waited_s(dumps[rank], records[rank]))
        lines.append(f"{ranks_text(ranks)}: {call} at {where}, {waited_text(dumps[longest], records[longest])}")
    return lines


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def stack_line(dump: Dump) -> str:
    """The main thread's stack, or the exception's, on one line, innermost first; the user's own frames only."""
    stack = dump.failure.stack if dump.failure is not None else dump.main_stack
    frames = user_stack(dump, stack)[:_MAX_STACK_FRAMES]
    return f"stack of rank {dump.rank}, innermost first: {_joined(frames)}"


def _joined(frames: Iterable[Frame]) -> str:
    return " < ".join(map(str, frames)) or "unknown"
