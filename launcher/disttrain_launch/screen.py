"""The launcher's own stdout and stderr: whole lines of many workers, and one progress bar at the bottom.

Nothing here blocks: a reader that does not read (a pager, a stopped terminal) must not keep the agent from noticing
that a worker died. What cannot be written now waits in memory, and `is_congested` asks for no more until it is gone.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import stat
import sys
from collections.abc import Mapping

from disttrain import settings

ATOMIC_BYTES = 4096
"""POSIX's PIPE_BUF on Linux: a write of that size to a pipe that polls writable neither blocks nor is torn."""
CONGESTED_BYTES = 1 << 18
BAR_INTERVAL_S = 10.0
"""How often a moving progress bar is written where there is no terminal to overwrite it on."""
_PREFIX_COLUMNS = len("[rank 0] ") + 1
ERASE_LINE = b"\x1b[2K"
_CLEAR_LINE = b"\r" + ERASE_LINE
_HIDE_CURSOR, _SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
_ESCAPES = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z])")
_COLORS = (36, 33, 32, 35, 34, 31)


class Outlet:
    """A file descriptor that is written to without ever blocking."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._waiting = bytearray()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
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
                return
            except OSError:
                # Nobody reads any more. Training goes on; its files are still written.
                self._is_broken = True
                break
            del self._waiting[:num_written]
        if self._is_broken:
            self._waiting.clear()

    def _piece(self) -> bytes:
        if not self.can_poll:
            return bytes(self._waiting)
        # Up to a line's end, where there is one: others may write to the same pipe.
        end = self._waiting.rfind(b"\n", 0, ATOMIC_BYTES) + 1
        return bytes(self._waiting[: end or ATOMIC_BYTES])


class Screen:
    """Lines and one bar on an outlet."""

    def __init__(self, outlet: Outlet, *, is_terminal: bool) -> None:
        self.outlet = outlet
        self.is_terminal = is_terminal
        self._bar = b""
        self._bar_shown_s = float("-inf")
        self._is_cursor_hidden = False

    def show_lines(self, prefix: bytes, lines: bytes) -> None:
        """Show whole lines, each with its newline, above the bar; the bar of the same prefix is over."""
        self._watch_cursor(lines)
        text = prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"
        if self._bar.startswith(prefix):
            self._erase_bar()
        self.outlet.put(_CLEAR_LINE + text + self._bar if self._bar else text)

    def restore(self) -> None:
        """Leave the terminal as it was: a worker that was killed can't show the cursor that it hid."""
        self._erase_bar()
        if self._is_cursor_hidden:
            self.outlet.put(_SHOW_CURSOR)

    def _watch_cursor(self, text: bytes) -> None:
        if self.is_terminal and b"\x1b[?25" in text:
            self._is_cursor_hidden = text.rfind(_HIDE_CURSOR) > text.rfind(_SHOW_CURSOR)

    def _erase_bar(self) -> None:
        if self._bar:
            self._bar = b""
            self.outlet.put(_CLEAR_LINE)

    def show_bar(self, prefix: bytes, text: bytes, now_s: float, *, is_bar: bool) -> None:
        """Show an unfinished line: below all others on a terminal, elsewhere now and then as a line of its own."""
        self._watch_cursor(text)
        if self.is_terminal:
            self._bar = prefix + _cut(text, shutil.get_terminal_size().columns - _PREFIX_COLUMNS)
            self.outlet.put(_CLEAR_LINE + self._bar)
        elif is_bar and now_s - self._bar_shown_s >= BAR_INTERVAL_S:
            self._bar_shown_s = now_s
            self.outlet.put(prefix + text + b"\n")


def _cut(text: bytes, width: int) -> bytes:
    # A bar that wraps could not be overwritten; escape sequences take no room, and colours must end.
    left = max(width, 8)
    kept = []
    for part in _ESCAPES.split(text.decode("utf-8", "replace")):
        shown = part if part.startswith("\x1b") else part[:left]
        left -= 0 if shown.startswith("\x1b") else len(shown)
        kept.append(shown)
    return "".join(kept).encode()


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
    """What tells workers, whose streams are pipes, that they end on a terminal, and how wide it is after the prefix."""
    if not all(screen.is_terminal for screen in screens.values()):
        return {}
    columns = shutil.get_terminal_size().columns - _PREFIX_COLUMNS
    return {"FORCE_COLOR": "1", "COLUMNS": str(max(columns, 1))}


def rank_prefix(rank: int, environ: Mapping[str, str], *, is_terminal: bool) -> bytes:
    text = f"[rank {rank}]"
    if is_terminal and not settings.NO_COLOR.read(environ):
        text = f"\x1b[{_COLORS[rank % len(_COLORS)]}m{text}\x1b[0m"
    return f"{text} ".encode()
