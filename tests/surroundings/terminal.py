"""A terminal in memory: what somebody would see of what a program writes to it.

It knows what the launcher uses: carriage return, newline, erasing a line or all below, moving up; colours take no room.
ECMA-48, 5th edition, 8.3.
"""

from __future__ import annotations

import re

from disttrain_launch.output.terminal.screen import Outlet, Screen

_PIECES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+")


class Terminal:
    """`columns` x `num_rows`; a newline also returns, as terminals are set to do for programs' output."""

    def __init__(self, columns: int, num_rows: int) -> None:
        self._columns = columns
        self._num_rows = num_rows
        self._lines = [""]
        self._row = self._column = 0

    def screen(self) -> Screen:
        """A screen of the launcher's that ends here."""
        return Screen(_Fed(self), is_terminal=True)

    def feed(self, data: bytes) -> None:
        """What a program writes."""
        for piece in _PIECES.findall(data.decode()):
            self._take(piece)

    def shown(self) -> list[str]:
        """All lines, those that have gone out of sight as well, without spaces at their ends."""
        lines = [line.rstrip() for line in self._lines]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def _take(self, piece: str) -> None:
        if piece == "\r":
            self._column = 0
        elif piece == "\n":
            self._row, self._column = self._row + 1, 0
            self._lines += [""] * (self._row + 1 - len(self._lines))
        elif piece == "\x1b[2K":
            self._lines[self._row] = ""
        elif piece == "\x1b[J":
            del self._lines[self._row + 1 :]
            self._lines[self._row] = self._lines[self._row][: self._column]
        elif piece.endswith("A") and piece.startswith("\x1b"):
            # What has scrolled out cannot be reached.
            self._row = max(self._row - int(piece[2:-1]), len(self._lines) - self._num_rows, 0)
        elif not piece.startswith("\x1b"):
            self._write(piece)

    def _write(self, text: str) -> None:
        while text:
            if self._column == self._columns:
                self._take("\n")
            part, text = text[: self._columns - self._column], text[self._columns - self._column :]
            line = self._lines[self._row].ljust(self._column)
            self._lines[self._row] = line[: self._column] + part + line[self._column + len(part) :]
            self._column += len(part)


class _Fed(Outlet):
    """An outlet that leads to a terminal in memory."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(0)
        self._terminal = terminal

    def put(self, data: bytes) -> None:
        self._terminal.feed(data)
