"""A save that is under way: what its caller holds."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

from disttrain.errors import CheckpointError


class PendingSave:
    """`staged` and `committed` are futures: the values may be changed; `path` is a whole save.

    `committed` has the path, or None for a save that was skipped or given up for a newer one (`was_dropped`), or raises
    CheckpointError. `num_bytes` of this rank's `total_bytes` have been written. `memory_problem` says why copies in
    memory (see `PeerMemory`) could not be kept, if so.
    """

    def __init__(self, path: Path, number: int = -1) -> None:
        self.path = path
        self.number = number
        self.staged: Future[None] = Future()
        self.committed: Future[Path | None] = Future()
        self.num_bytes = 0
        self.total_bytes = 0
        self.was_dropped = False
        self.memory_problem = ""
        self._mutex = threading.RLock()

    def result(self, timeout_s: float | None = None) -> Path | None:
        """Wait until it has been committed, or has failed."""
        return self.committed.result(timeout_s)

    def done(self) -> bool:
        """Whether it has ended, one way or the other."""
        return self.committed.done()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, without raising what it raises. Returns whether it has come."""
        try:
            self.committed.exception(timeout_s)
        except TimeoutError:
            return False
        return True

    @property
    def progress(self) -> float:
        """How much of this rank's part has been written, from 0 to 1."""
        return 1.0 if self.done() else self.num_bytes / max(1, self.total_bytes)

    def failure(self) -> CheckpointError | None:
        """The error that it ended with; None while it is under way, and when it ended well."""
        error = self.committed.exception(0) if self.done() else None
        assert error is None or isinstance(error, CheckpointError)
        return error

    def mark_staged(self) -> None:
        """The values are safe."""
        with self._mutex:
            if not self.staged.done():
                self.staged.set_result(None)

    def drop(self) -> None:
        """It was not written, and shall not be."""
        self.was_dropped = self.end(None) or self.was_dropped

    def end(self, outcome: Path | CheckpointError | None) -> bool:
        """It has been committed, or dropped, or has failed. Returns whether that was new."""
        with self._mutex:
            if self.committed.done():
                return False
            self.mark_staged()
            if isinstance(outcome, CheckpointError):
                self.committed.set_exception(outcome)
            else:
                self.committed.set_result(outcome)
        return True
