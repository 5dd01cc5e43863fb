"""A save that is under way: what its caller holds."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

from disttrain.errors import CheckpointError


class PendingSave(Future[Path | None]):
    """A future of the save's path, which ends when the save is complete.

    None for a save that was skipped or given up for a newer one (`was_dropped`); it may raise CheckpointError.
    `staged` is a future, too: the values may be changed. `num_bytes` of this rank's `total_bytes` have been written.
    `memory_problem` says why copies in memory (see `PeerMemory`) could not be kept, if so; `differing` names plain
    tensors that have come to differ among ranks since the save was planned.
    """

    def __init__(self, path: Path, number: int = -1) -> None:
        super().__init__()
        self.path = path
        self.number = number
        self.staged: Future[None] = Future()
        self.num_bytes = 0
        self.total_bytes = 0
        self.was_dropped = False
        self.memory_problem = ""
        self.differing: list[str] = []
        self._mutex = threading.RLock()

    @property
    def committed(self) -> Future[Path | None]:
        """Itself."""
        return self

    def result(self, timeout: float | None = None, *, timeout_s: float | None = None) -> Path | None:
        """Wait until it has been committed, or has failed."""
        return super().result(timeout if timeout_s is None else timeout_s)

    def cancel(self) -> bool:
        """False: other ranks write their parts of it."""
        return False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, without raising what it raises. Returns whether it has come."""
        try:
            self.exception(timeout_s)
        except TimeoutError:
            return False
        return True

    @property
    def progress(self) -> float:
        """Fraction of this rank's part that has been written, from 0 to 1."""
        return 1.0 if self.done() else self.num_bytes / max(1, self.total_bytes)

    def failure(self) -> CheckpointError | None:
        """The error that it ended with; None while it is under way, and when it ended well."""
        error = self.exception(0) if self.done() else None
        assert error is None or isinstance(error, CheckpointError)
        return error

    def mark_staged(self) -> None:
        """The values are safe."""
        with self._mutex:
            if not self.staged.done():
                self.staged.set_result(None)

    def drop(self) -> None:
        """Marks the save as dropped: it was not written, and shall not be."""
        self.was_dropped = self.end(None) or self.was_dropped

    def end(self, outcome: Path | CheckpointError | None) -> bool:
        """Marks the save as committed, dropped or failed. Returns whether that was new."""
        with self._mutex:
            if self.done():
                return False
            self.mark_staged()
            if isinstance(outcome, CheckpointError):
                self.set_exception(outcome)
            else:
                self.set_result(outcome)
        return True
