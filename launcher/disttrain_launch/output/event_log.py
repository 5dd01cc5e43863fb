"""The file of what happened to a job: one JSON object for each line, written by node 0."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path

from disttrain.errors import LaunchError
from disttrain_launch.output.events import Record
from disttrain_launch.request.job import OPERATION


class EventLog:
    """Safe to write from any thread; each record is whole in the file once `write` returns.

    Args: file  None: nothing is kept. What an earlier job left in it stays.
    Raises: LaunchError when it cannot be written.
    """

    def __init__(self, file: Path | None) -> None:
        self._lock = threading.Lock()
        self._file = None
        if file is None:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(file, "ab", buffering=0)  # noqa: SIM115  closed by `close`
        except OSError as error:
            problem = f"{file} cannot be written: {error.strerror}."
            raise LaunchError(OPERATION, problem, "Name another --event-log.") from None

    def write(self, records: Iterable[Record]) -> None:
        """Append these. A full disk ends the log, not the job."""
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))
            except OSError:
                self._file.close()
                self._file = None

    def close(self) -> None:
        """Write no more. Idempotent."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
