"""The server's log: lines on stderr, that can neither hold the server nor be made a flood by strangers."""

from __future__ import annotations

import os
import select
from typing import Final

PERIOD_S: Final = 10.0
MAX_LINES: Final = 50
"""In each period; of the others it is said how many they were."""


class Log:
    """Logs the peers that the server hung up on, and why."""

    def __init__(self, descriptor: int = 2) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._begun_s = float("-inf")
        self._num_lines = 0

    def say(self, text: str, now_s: float) -> None:
        """Write a line, unless there were too many of late, or nobody takes it now."""
        if now_s - self._begun_s >= PERIOD_S:
            num_lines, self._num_lines, self._begun_s = self._num_lines, 0, now_s
            if num_lines > MAX_LINES:
                text = f"disttrain store: {num_lines - MAX_LINES} lines were left out here\n{text}"
        self._num_lines += 1
        if self._num_lines <= MAX_LINES:
            self._write(f"{text}\n")

    def _write(self, text: str) -> None:
        try:
            if self._poll.poll(0):
                os.write(self._descriptor, text.encode(errors="replace")[: select.PIPE_BUF])
        except OSError:
            # Nobody reads any more.
            return
