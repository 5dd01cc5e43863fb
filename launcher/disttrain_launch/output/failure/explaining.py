"""Says what takes a while to find out, when it is known: a thread computes it, the event loop says it."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from disttrain_launch.output.streams.streams import Streams
from disttrain_launch.request.job import OPERATION

_WAIT_S = 10.0


class Explanations:
    """`fd` becomes readable when there is something to say; None before the first `begin`."""

    def __init__(self) -> None:
        self.fd: int | None = None
        self._write_fd = -1
        self._texts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def begin(self, explain: Callable[[], str]) -> None:
        """Return at once. Raises OSError when there are too many open files."""
        if self.fd is None:
            self.fd, self._write_fd = os.pipe()
            os.set_blocking(self.fd, False)
        thread = threading.Thread(target=self._run, args=(explain,), name="explaining", daemon=True)
        self._threads.append(thread)
        thread.start()

    def show(self, output: Streams) -> None:
        """Say what is known by now, and has not been said."""
        if self.fd is None:
            return
        with suppress(BlockingIOError):
            os.read(self.fd, 4096)
        texts = []
        while not self._texts.empty():
            texts.append(self._texts.get())
        output.say("".join(texts))

    def finish(self, output: Streams) -> None:
        """As `show`, once all is known, or after a while."""
        for thread in self._threads:
            thread.join(_WAIT_S)
        self.show(output)

    def _run(self, explain: Callable[[], str]) -> None:
        try:
            self._texts.put(explain())
            os.write(self._write_fd, b"!")
        except OSError as problem:
            print(f"{OPERATION}: {problem}", file=sys.stderr)
