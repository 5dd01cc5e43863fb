"""Shows the progress of a command: a bar on a terminal where `rich` is installed, else a line now and then.
Torch-free."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from disttrain.console import size_text

_LINE_EVERY_S = 10.0


@contextmanager
def progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Gives a function, for any thread, to be told how many more bytes are done. Shows on stderr."""
    if not sys.stderr.isatty():
        yield _Lines(title, total_bytes).advance
        return
    try:
        from rich.console import Console  # an optional extra, and slow to load

        # The same.
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    except ImportError:
        yield _Lines(title, total_bytes).advance
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


class _Lines:
    """Prints at most one line in ten seconds: short commands print none."""

    def __init__(self, title: str, total_bytes: int) -> None:
        self._title, self._total_bytes = title, total_bytes
        self._done_bytes = 0
        self._last_s = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            if time.monotonic() - self._last_s < _LINE_EVERY_S:
                return
            self._last_s = time.monotonic()
            share = self._done_bytes / max(self._total_bytes, 1)
            print(f"{self._title}: {size_text(self._done_bytes)}, {share:.0%}", file=sys.stderr)  # noqa: T201


def speed_text(num_bytes: int, duration_s: float) -> str:
    """Such as `1.5 GiB in 0.5 s, 3.2 GB/s`."""
    return f"{size_text(num_bytes)} in {duration_s:.3g} s, {num_bytes / max(duration_s, 1e-9) / 1e9:.3g} GB/s"
