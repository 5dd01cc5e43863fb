"""Reads the end of a worker's stderr: the traceback of what ended it, and whether another rank is to blame."""

from __future__ import annotations

import re

MAX_LINES = 40
"""Of a worker that left no traceback."""
MAX_CHARS = 32 << 10
_MAX_SUMMARY_CHARS = 300
_MAX_MESSAGE_LINES = 20
_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""The text that torch puts before each line of a traceback."""
_TRACEBACK = re.compile(r"^ *(\+ Exception Group )?Traceback \(most recent call last\):")
_NATIVE_LOG = re.compile(r"^\[?[IWEF]\d{4} \d\d:")
"""A line of the log of C++, which may come after the script's own last one."""
_MARGIN = re.compile(r"^ *\| ?")
"""Of the lines of an exception group."""
_TERMINATED = re.compile(r"^terminate called ")
"""An exception of C++ that nobody has caught; the next line says which."""
_FATAL = re.compile(r"^Fatal Python error: ")
"""A signal such as SIGSEGV, as `faulthandler` tells of it; Python's stack follows."""
_JOINED = re.compile(r"(?<=[^\s|])(?=Traceback \(most recent call last\):$)", re.MULTILINE)
"""The beginning of a traceback behind what was printed without an end of line, such as a bar."""
_FRAME = re.compile(r'^  File ".*", line \d+, in ')
_THREAD = re.compile(r"^Exception in thread ")
"""The line before the traceback of what has ended a thread."""
_IGNORED = re.compile(r"^Exception ignored (in|while|on)\b")
"""The line before the traceback of an exception that has ended nothing, in a finalizer or at the interpreter's end."""
_OTHER_THREAD = re.compile(r"^Thread 0x[0-9a-f]+ .*\(most recent call first\):")
_CHAINED = ("The above exception was the direct cause of", "During handling of the above exception")
_CONSEQUENCE = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Connection was likely closed|Socket Timeout by peer"
    r"|remote process (has )?(exited|terminated)|ncclRemoteError|communicator was aborted|peer (has )?died"
    r"|watchdog thread terminated with exception: NCCL error|Watchdog caught collective operation timeout"
    r"|has left the job|not every rank came, nor can|: rank \d+ refused |has ended: |StoreConnectionError"
    r"|: not every rank came within .*; its thread .* has failed \("
)
"""The words of transports and stores, ours and torch's, when somebody else has gone."""


def excerpt(text: str) -> str:
    """The last traceback, with those that led to it and what follows it; without one the last lines."""
    lines = _lines(text)
    first = _first_of_chain(lines)
    if first is None:
        begins = (number for number, line in enumerate(lines) if _FATAL.match(line) or _TERMINATED.match(line))
        first = next(begins, max(0, len(lines) - MAX_LINES))
    return "\n".join(_of_current_thread(lines[first:]))[-MAX_CHARS:]


def summary(text: str) -> str:
    """The line of the exception that the last traceback is of, such as `ValueError: bad batch`; empty without one."""
    message = _message(_lines(text))
    return message[0][:_MAX_SUMMARY_CHARS] if message else ""


def last_line(text: str) -> str:
    """The last line that is not of C++'s log, such as the text of `sys.exit(text)`; empty where nothing was said."""
    said = (line.strip() for line in reversed(_lines(text)) if line.strip() and not _NATIVE_LOG.match(line))
    return next(said, "")[:_MAX_SUMMARY_CHARS]


def is_consequence(text: str) -> bool:
    """True when the last exception says that a peer, or the store, went away."""
    return any(_CONSEQUENCE.search(line) for line in _message(_lines(text)))


def is_own_error(text: str) -> bool:
    """True when it ends with an exception that is not of others."""
    return bool(summary(text)) and not is_consequence(text)


def _of_current_thread(lines: list[str]) -> list[str]:
    """The lines without those of `faulthandler` on threads that only were there, and on modules."""
    kept: list[str] = []
    is_other = False
    for line in lines:
        if _OTHER_THREAD.match(line):
            is_other = True
        elif line and not line[0].isspace():
            is_other = False
        if not (is_other or line.startswith("Extension modules: ")):
            kept.append(line)
    while kept and not kept[-1]:
        kept.pop()
    return kept


def _lines(text: str) -> list[str]:
    # Of a progress bar the last state counts.
    lines = [_PREFIX.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in _JOINED.sub("\n", text).split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    lasting = _without_ignored(lines)
    return lasting if any(map(_TRACEBACK.match, lasting)) else lines


def _without_ignored(lines: list[str]) -> list[str]:
    """The lines without the exceptions that Python has ignored."""
    kept: list[str] = []
    rest = iter(lines)
    for line in rest:
        if not _IGNORED.match(line):
            kept.append(line)
            continue
        for inner in rest:
            if inner.strip() and not inner[0].isspace() and not _TRACEBACK.match(inner):
                break  # its message, of one line
    return kept


def _first_of_chain(lines: list[str]) -> int | None:
    """The index of the line where the last traceback begins, or the first of those that it was chained to."""
    starts = [index for index, line in enumerate(lines) if _TRACEBACK.match(line)]
    while starts[1:] and not _message(lines[starts[-1] :]):
        starts.pop()  # It stands in an exception's own text.
    first = None
    while starts:
        first = starts.pop()
        before = next((line for line in reversed(lines[:first]) if line.strip()), "")
        if not before.startswith(_CHAINED):
            return first - 1 if first and _THREAD.match(lines[first - 1]) else first
    return first


def _message(lines: list[str]) -> list[str]:
    """The lines from the last exception's on, of Python or C++."""
    for index in reversed(range(len(lines))):
        after = lines[index + 1 :]
        if _TERMINATED.match(lines[index]):
            return [line.strip().removeprefix("what():").strip() for line in after[:_MAX_MESSAGE_LINES]]
        if _FATAL.match(lines[index]) and not any(map(_TERMINATED.match, lines[:index])):
            return [lines[index]]
        if begun := _TRACEBACK.match(lines[index]):
            message = _after_frames([_MARGIN.sub("", line) for line in after] if begun[1] else after)
            if message:  # Else it stands in an exception's own text.
                return message
    # Of a deep stack only the end may be there.
    last = next((index for index in reversed(range(len(lines))) if _FRAME.match(lines[index])), None)
    return [] if last is None else _after_frames(lines[last:])


def _after_frames(lines: list[str]) -> list[str]:
    """The message of an exception, which is not indented."""
    begins = next((offset for offset, line in enumerate(lines) if line.strip() and not line[0].isspace()), None)
    return [] if begins is None else lines[begins : begins + _MAX_MESSAGE_LINES]
