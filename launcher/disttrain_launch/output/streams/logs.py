"""One stream of one worker: bytes come in as they like, whole lines go to the screen and raw bytes to a file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Protocol

from disttrain.errors import LaunchError
from disttrain_launch.output.terminal.screen import ERASE_LINE
from disttrain_launch.request.job import OPERATION

MAX_LINE_BYTES = 1 << 20
"""A longer line is cut: a stream that never ends its line must not fill the memory."""
TAIL_BYTES = 64 << 10
READ_BYTES = 1 << 16
_ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
MAX_DRAIN_READS = 64


class LineFolder:
    r"""Cuts a stream into whole lines, folding what a carriage return overwrote: of `10%\r20%\rdone\n`, `done\n`."""

    def __init__(self) -> None:
        self._rest = b""
        self.is_bar = False
        """Whether the unfinished line overwrote an earlier text, or will be."""

    @property
    def unfinished(self) -> bytes:
        """The line begun last, as a terminal would show it."""
        return self._rest.rstrip(b"\r")

    def feed(self, data: bytes) -> bytes:
        """The lines that `data` completes, each with its newline; empty when none."""
        lines, newline, rest = (self._rest + data).rpartition(b"\n")
        if newline:
            self.is_bar = False
        if b"\r" in rest or ERASE_LINE in rest:
            self.is_bar = True
            # A return at the end has overwritten nothing yet.
            rest = _visible(rest) + (b"\r" if rest.endswith(b"\r") else b"")
        if len(rest) > MAX_LINE_BYTES:
            lines, newline, rest = lines + newline + rest, b"\n", b""
        self._rest = rest
        if b"\r" in lines or ERASE_LINE in lines:
            lines = b"\n".join(_visible(line) for line in lines.split(b"\n"))
        return lines + newline

    def end(self) -> bytes:
        """The rest of a stream that has ended, as a line; empty when none of it can be seen."""
        rest, self._rest, self.is_bar = self.unfinished, b"", False
        return rest + b"\n" if _ESCAPE.sub(b"", rest) else b""


def _visible(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2].rpartition(ERASE_LINE)[2]


class Voice(Protocol):
    """A stream's way to the screen."""

    def show_lines(self, lines: bytes) -> None:
        """Whole lines, each with its newline."""
        ...

    def show_bar(self, text: bytes, *, is_bar: bool) -> None:
        """A line that is not whole yet; `is_bar`: it overwrites itself."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


class StreamPump:
    """Moves one stream to where it belongs and remembers its end for the report.

    Args: fd  the pipe's reading end, non-blocking, owned from now on;  voice  None: not shown;
          log_file  None: not kept;  shows_bar  whether a progress bar is shown while it moves, or its last state only;
          say  shows a message of the launcher's own.
    """

    def __init__(
        self,
        fd: int,
        *,
        voice: Voice | None,
        log_file: BinaryIO | None,
        shows_bar: bool,
        say: Callable[[str], None],
    ) -> None:
        self.fd = fd
        self._voice = voice
        self._log_file = log_file
        self._say = say
        self._shows_bar = shows_bar
        self._folder = LineFolder()
        self._tail = b""
        self._is_open = True
        self.is_over = False
        """Nobody holds the other end any more."""

    def read_some(self) -> bool:
        """Move one read's worth of bytes; False when there is nothing to read now, or the stream is over."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.is_over = True
            return False
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if self._log_file is not None:
            self._keep(self._log_file, data)
        if self._voice is not None:
            self._show(self._voice, data)
        return True

    def drain(self) -> None:
        """Move what is in the pipe now; a bounded part of it where a child of the worker goes on writing."""
        for _ in range(MAX_DRAIN_READS):
            if self.is_over or not self.read_some():
                break

    def close(self) -> None:
        """Show an unfinished line and let go of pipe and file. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        if self._voice is not None:
            if lines := self._folder.end():
                self._voice.show_lines(lines)
            self._voice.close()
        os.close(self.fd)
        if self._log_file is not None:
            self._log_file.close()

    @property
    def tail(self) -> str:
        """The last lines that came, as text."""
        return self._tail.decode("utf-8", "replace")

    def _keep(self, log_file: BinaryIO, data: bytes) -> None:
        # A full disk ends the log, not the job.
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[log_file.write(rest) :]
        except OSError as error:
            self._log_file = None
            log_file.close()
            self._say(f"{OPERATION}: {log_file.name} is not written any more: {error.strerror}.\n")

    def _show(self, voice: Voice, data: bytes) -> None:
        if lines := self._folder.feed(data):
            voice.show_lines(lines)
        if self._shows_bar and self._folder.unfinished:
            voice.show_bar(self._folder.unfinished, is_bar=self._folder.is_bar)


def log_path(directory: Path, rank: int, stream_name: str) -> Path:
    return directory / f"rank-{rank}" / f"{stream_name}.log"


def open_log(path: Path, run_id: str) -> BinaryIO:
    """Open for appending: what an earlier run left, perhaps the reason to start again, is never lost."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab", buffering=0)  # noqa: SIM115  closed by the pump
        if file.tell():
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            file.write(f"\n--- run {run_id}, {now} ---\n".encode())
    except OSError as error:
        raise LaunchError(
            OPERATION, f"{path} cannot be written: {error.strerror}.", "Name another --log-dir."
        ) from None
    return file
