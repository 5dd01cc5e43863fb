"""Holds back what a worker's stderr says as it ends, until it is known which rank is to blame.

When a rank fails, all others fail in their collectives, and each prints a traceback, and its transport's C++ code
another. So what follows a traceback's first line is held. A worker that lives on gets it shown a little later; of one
that ends, it is shown if the worker is to blame, and counted otherwise. Stack frames of C++ are counted anyway.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from disttrain_launch.output.streams.logs import Voice

HOLD_S = 8.0
"""The time to end for a process that prints its last traceback: loaders of data, or GPUs, are let go of first."""
MAX_HELD_BYTES = 1 << 20
_BEGINS = re.compile(
    rb"^(\[rank\d+\]: ?)?( *(\+ Exception Group )?Traceback \(most recent call last\):|terminate called "
    rb"|Fatal Python error: |Exception in thread )"
    rb"|^(\[rank\d+\]:)?\[E\d{4} [\d:.]+ [\w/]+\.cpp:\d+\]",
    re.MULTILINE,
)
"""Of Python and its threads, of C++'s `std::terminate`, of `faulthandler`, and of errors in torch's own log."""
_JOINED = re.compile(rb"(?<=[^\s|])(?=Traceback \(most recent call last\):$)", re.MULTILINE)
"""The beginning of a traceback behind what was printed without an end of line, such as a bar."""
_FRAME = re.compile(rb"^(\[rank\d+\]: ?)?frame #\d+: ")


class Frames:
    """Counts lines of C++ stacks in place of passing them on."""

    def __init__(self) -> None:
        self._num_frames = 0

    def fold(self, lines: bytes) -> bytes:
        """Whole lines, with a count in place of frames; those at the end are counted with what comes next."""
        if not self._num_frames and b"frame #" not in lines:
            return lines
        kept = []
        for line in lines.splitlines(keepends=True):
            if _FRAME.match(line):
                self._num_frames += 1
            else:
                kept += [self.rest(), line]
        return b"".join(kept)

    def rest(self) -> bytes:
        """The count of frames that nothing has followed yet, as a line; empty when there are none."""
        num_frames, self._num_frames = self._num_frames, 0
        if num_frames == 1:
            return b"(1 line of a C++ stack; --verbose shows it)\n"
        return b"(%d lines of a C++ stack; --verbose shows them)\n" % num_frames if num_frames else b""


def without_frames(text: str) -> str:
    """A text with counts in place of C++ stacks."""
    frames = Frames()
    folded = frames.fold(text.encode("utf-8", "replace") + b"\n") + frames.rest()
    return folded.decode("utf-8", "replace").rstrip("\n")


class HoldingVoice:
    """A stderr's way to the screen through `voice`. Times are of any one clock."""

    def __init__(self, voice: Voice, clock: Callable[[], float] = time.monotonic) -> None:
        self._voice = voice
        self._clock = clock
        self._frames = Frames()
        self._since_s: float | None = None
        self.held = b""

    @property
    def deadline_s(self) -> float | None:
        """The time at which `release` is to be called, unless the process has ended."""
        return None if self._since_s is None else self._since_s + HOLD_S

    def show_lines(self, lines: bytes) -> None:
        if self._since_s is None:
            if b"Traceback (" in lines:
                lines = _JOINED.sub(b"\n", lines)
            begins = _BEGINS.search(lines)
            if begins is None:
                self._pass_on(lines)
                return
            self._pass_on(lines[: begins.start()])
            lines, self._since_s = lines[begins.start() :], self._clock()
        self.held += lines
        if len(self.held) > MAX_HELD_BYTES:
            self.release()

    def show_bar(self, text: bytes, *, is_bar: bool) -> None:
        if self._since_s is None:
            self._voice.show_bar(text, is_bar=is_bar)

    def release(self) -> None:
        """Show what is held, and go on as before."""
        self._since_s, held, self.held = None, self.held, b""
        self._pass_on(held)

    def close(self) -> None:
        """Nothing more will come; what is held stays so."""
        if rest := self._frames.rest():
            self._voice.show_lines(rest)
        self._voice.close()

    def _pass_on(self, lines: bytes) -> None:
        if folded := self._frames.fold(lines):
            self._voice.show_lines(folded)
