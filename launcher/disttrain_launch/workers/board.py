"""The state of this node's workers: who runs, who ended and how, and what each has reported."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from disttrain import settings
from disttrain.reports import asks, make_page, put_mark, read
from disttrain_launch.output.view import NodeState, WorkerState
from disttrain_launch.workers.outcome import Exit
from disttrain_launch.workers.worker import Worker


class Board:
    """Written by the agent, read by any thread.

    Args: folder  of the launcher, where the workers' pages lie. Where they cannot be made, workers report nothing.
    """

    def __init__(self, folder: Path, num_local_workers: int) -> None:
        self._lock = threading.Lock()
        self._round = -1
        self._workers: dict[int, WorkerState] = {}
        self._pages = [folder / f"report-{local_rank}" for local_rank in range(num_local_workers)]
        self._wipe()

    def variables(self, local_rank: int) -> dict[str, str]:
        """Environment variables for a worker."""
        return {settings.REPORT_FILE.name: str(self._pages[local_rank])} if self._pages else {}

    def begin(self, round: int) -> None:
        """Forget the workers before; none of them is left."""
        with self._lock:
            self._round = round
            self._workers = {}
            self._wipe()

    def started(self, worker: Worker) -> None:
        with self._lock:
            self._workers[worker.local_rank] = WorkerState(worker.rank, worker.pid)

    def ended(self, local_rank: int, end: Exit) -> None:
        with self._lock:
            self._workers[local_rank] = replace(self._workers[local_rank], state=str(end))

    def mark(self, mark: bytes) -> None:
        """Tell the workers of this round what signals mean to them from now on."""
        with suppress(OSError):  # Nothing of it is needed for training.
            for page in self._pages:
                put_mark(page, mark)

    def is_asked(self) -> bool:
        """True once a worker of this round has asked whether to stop."""
        return any(asks(self._page(local_rank)) for local_rank in range(len(self._pages)))

    def state(self) -> NodeState:
        """Of now."""
        with self._lock:
            for local_rank, worker in self._workers.items():
                # Nothing is found while a report is being written: then the one before is still good.
                if self._pages and (report := self._told(local_rank)) is not None:
                    self._workers[local_rank] = replace(worker, told_s=report[0], numbers=report[1])
            return NodeState(self._round, tuple(worker for _, worker in sorted(self._workers.items())))

    def _wipe(self) -> None:
        try:
            for page in self._pages:
                make_page(page)
        except OSError:
            self._pages = []  # Nothing of it is needed for training.

    def _told(self, local_rank: int) -> tuple[float, dict[str, int | float | None]] | None:
        return read(self._page(local_rank))

    def _page(self, local_rank: int) -> bytes:
        try:
            return self._pages[local_rank].read_bytes()
        except OSError:
            return b""  # Somebody has tidied up among temporary files.
