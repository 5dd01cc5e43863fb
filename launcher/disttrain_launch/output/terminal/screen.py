"""The launcher's own stdout and stderr: whole lines of many workers, at the bottom a table and one progress bar.

Nothing here blocks: a reader that does not read (a pager, a stopped terminal) must not keep the agent from noticing
that a worker died. What cannot be written now waits in memory, and `is_congested` asks for no more until it is gone.
"""

from __future__ import annotations

import errno
import os
import select
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing

from disttrain import settings
from disttrain_launch.output.terminal.text import cut, harmless, width
from disttrain_launch.request.job import OPERATION

ATOMIC_BYTES = 4096
"""POSIX's PIPE_BUF on Linux: a write of that size to a pipe that polls writable neither blocks nor is torn."""
CONGESTED_BYTES = 1 << 18
_RETRY_S = 0.01
SAY_MS = 1000
BAR_INTERVAL_S = 10.0
"""The interval at which a moving progress bar is written where there is no terminal to overwrite it on."""
_PREFIX_COLUMNS = len("[rank 0] ") + 1
ERASE_LINE = b"\x1b[2K"
_CLEAR_LINE = b"\r" + ERASE_LINE
_HIDE_CURSOR, _SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
_NO_COLOUR = b"\x1b[0m"
_BOLD = 1
_COLORS = (36, 33, 32, 35, 34, 31)


class Outlet:
    """A file descriptor that is written to without ever blocking; `fd`: what is written to in its place."""

    def __init__(self, fd: int) -> None:
        self.fd = _never_blocking(fd)
        self._is_own = self.fd != fd
        self._name = "standard output" if fd == 1 else ""
        self._waiting = bytearray()
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLOUT)
        self._is_broken = False
        # A file on disk can always be written, and epoll does not take it.
        self.can_poll = not stat.S_ISREG(os.fstat(fd).st_mode)

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def is_congested(self) -> bool:
        return len(self._waiting) > CONGESTED_BYTES

    def put(self, data: bytes) -> None:
        self._waiting += data
        self.flush(0)

    def flush(self, wait_ms: int | None) -> None:
        """Write what waits while the reader takes it; `wait_ms` None: until all is written."""
        while self._waiting and not self._is_broken:
            if self.can_poll and not self._poll.poll(wait_ms):
                return
            try:
                num_written = os.write(self.fd, self._piece())
            except BlockingIOError:
                if wait_ms is not None:
                    return
                time.sleep(_RETRY_S)  # Somebody else was faster, or there is not room enough.
                continue
            except OSError as error:
                # Nobody reads any more, or a disk is full. Training goes on; its files are still written.
                self._is_broken = True
                if error.errno != errno.EPIPE and self._name:
                    say(f"{self._name} is not written any more: {error.strerror}.")
                break
            del self._waiting[:num_written]
        if self._is_broken:
            self._waiting.clear()

    def close(self) -> None:
        """Let go of what is written to in place of the descriptor given."""
        if self._is_own:
            os.close(self.fd)

    def _piece(self) -> bytes:
        if not self.can_poll:
            return bytes(self._waiting)
        # Up to a line's end, where there is one: others may write to the same pipe.
        end = self._waiting.rfind(b"\n", 0, ATOMIC_BYTES) + 1
        return bytes(self._waiting[: end or ATOMIC_BYTES])


def say(text: str) -> None:
    """Writes one line of the launcher's own to stderr, as far as somebody reads it."""
    sys.stderr.flush()
    with closing(Outlet(2)) as outlet:
        outlet.put(f"{OPERATION}: {text}\n".encode("utf-8", "replace"))
        # A terminal that nobody reads must keep nobody, least of all who was told to stop.
        outlet.flush(SAY_MS)


def _never_blocking(fd: int) -> int:
    """A terminal with little room left polls writable, and a write of more than that blocks: a way of our own to it.

    Who started us shares `fd`, and must not find it changed.
    """
    if not os.isatty(fd):
        return fd
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return fd  # such as another user's terminal, after su


class Screen:
    """Lines on an outlet; on a terminal a table stays below them, and one bar below that."""

    def __init__(self, outlet: Outlet, *, is_terminal: bool) -> None:
        self.outlet = outlet
        self.is_terminal = is_terminal
        self._table: Sequence[bytes] = ()
        self._bar = b""
        self._drawn: list[bytes] = []
        """The lines of table and bar, as they stand there."""
        self._is_question = False
        self._bar_shown_s = float("-inf")
        self._is_cursor_hidden = False

    def show_lines(self, lines: bytes, *, ends_bar: bool = False) -> None:
        """Show whole lines, each with its newline, above table and bar. `ends_bar`: they are what it came to."""
        self._watch_cursor(lines)
        if self.is_terminal:
            lines = harmless(lines)
        if ends_bar:
            self._bar = b""
        self._draw(lines)

    def show_bar(self, prefix: bytes, text: bytes, now_s: float, *, is_bar: bool) -> None:
        """Show an unfinished line: below all others on a terminal, elsewhere now and then as a line of its own."""
        self._watch_cursor(text)
        if self.is_terminal:
            # A bar that wraps could not be overwritten.
            self._bar = prefix + cut(harmless(text), max(self._columns - _PREFIX_COLUMNS, 8))
            self._is_question = not is_bar
            self._draw()
        elif is_bar and now_s - self._bar_shown_s >= BAR_INTERVAL_S:
            self._bar_shown_s = now_s
            self.outlet.put(prefix + text + b"\n")

    def show_table(self, lines: Sequence[bytes]) -> None:
        """Show these lines, none wider than the terminal, in place of those before; empty: none."""
        self._table = lines
        # Who reads slowly gets no more than he takes.
        if not self._asks and not self.outlet.is_waiting:
            self._draw()

    def leave_question(self) -> None:
        """Lines come that don't answer it: it stays where it is, and they come below. A bar is no question."""
        if self._asks:
            self.outlet.put(b"\n")
            self._bar, self._drawn = b"", []

    def restore(self) -> None:
        """Leave the terminal as it was: a worker that was killed can't show the cursor that it hid."""
        self._bar, self._table = b"", ()
        self._draw()
        if self._is_cursor_hidden:
            self.outlet.put(_SHOW_CURSOR)

    def _watch_cursor(self, text: bytes) -> None:
        if self.is_terminal and b"\x1b[?25" in text:
            self._is_cursor_hidden = text.rfind(_HIDE_CURSOR) > text.rfind(_SHOW_CURSOR)

    @property
    def _asks(self) -> bool:
        return bool(self._bar) and self._is_question

    @property
    def _columns(self) -> int:
        try:
            columns = os.get_terminal_size(self.outlet.fd).columns
        except OSError:
            columns = 0
        return columns or shutil.get_terminal_size().columns

    def _draw(self, lines: bytes = b"") -> None:
        """Write `lines` over table and bar, and these anew below them."""
        erasure = self._erasure()
        # Whoever answers a question ends its line, unseen by us: only that one line may stand there then.
        table = () if self._asks else self._table
        self._drawn = [*table, self._bar] if self._bar else [*table]
        # Colours that a worker has not ended are its own.
        end = _NO_COLOUR if b"\x1b[" in lines and self._drawn else b""
        if text := erasure + lines + end + b"\n".join(self._drawn):
            self.outlet.put(text)

    def _erasure(self) -> bytes:
        if not self._drawn:
            return b""
        # A terminal that was made narrower has wrapped them.
        num_rows = sum(max(-(-width(line) // self._columns), 1) for line in self._drawn)
        return _CLEAR_LINE if num_rows == 1 else b"\r\x1b[%dA\x1b[J" % (num_rows - 1)


class PlainVoice:
    """One stream's own way to a screen, with a prefix before each line."""

    def __init__(self, screen: Screen, prefix: bytes) -> None:
        self._screen = screen
        self._prefix = prefix
        self._has_bar = False

    def show_lines(self, lines: bytes) -> None:
        self._screen.show_lines(prefixed(self._prefix, lines), ends_bar=self._has_bar)
        self._has_bar = False

    def show_bar(self, text: bytes, *, is_bar: bool) -> None:
        self._has_bar = True
        self._screen.show_bar(self._prefix, text, time.monotonic(), is_bar=is_bar)

    def close(self) -> None:
        """Nothing is held back here."""


def prefixed(prefix: bytes, lines: bytes) -> bytes:
    """`prefix` before each of some whole lines."""
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"


def make_screens() -> dict[int, Screen]:
    """Screens for stdout (1) and stderr (2); one and the same where both lead to the same place, so that lines of the
    two are never mixed."""
    screens = {}
    for stream, file in ((1, sys.stdout), (2, sys.stderr)):
        if file is not None:
            file.flush()
        screens[stream] = Screen(Outlet(stream), is_terminal=os.isatty(stream))
    if os.path.samestat(os.fstat(1), os.fstat(2)):
        screens[2] = screens[1]
    return screens


def terminal_variables(screens: Mapping[int, Screen]) -> dict[str, str]:
    """Variables that tell workers, whose streams are pipes, of the terminal behind and its width after the prefix."""
    if not all(screen.is_terminal for screen in screens.values()):
        return {}
    columns = shutil.get_terminal_size().columns - _PREFIX_COLUMNS
    return {"FORCE_COLOR": "1", "COLUMNS": str(max(columns, 1))}


def ranks_prefix(ranks: Iterable[int], environ: Mapping[str, str], *, is_terminal: bool) -> bytes:
    """Such as `[rank 3] ` or `[ranks 0-7] `; on a terminal each rank has its colour."""
    first, *others = sorted(ranks)
    text, color = f"[rank {first}]", _COLORS[first % len(_COLORS)]
    if others:
        from disttrain.flight_recorder.record.record import ranks_text  # a start does not wait for it

        text, color = f"[{ranks_text((first, *others))}]", _BOLD
    if is_terminal and not settings.NO_COLOR.read(environ):
        text = f"\x1b[{color}m{text}\x1b[0m"
    return f"{text} ".encode()
