"""All streams of a node's workers: which of them are kept, and which are shown under which prefix."""

from __future__ import annotations

import selectors
from collections.abc import Mapping

from disttrain_launch.job import STDERR, STDOUT, STREAM_NAMES, JobSpec
from disttrain_launch.logs import StreamPump, log_path, open_log
from disttrain_launch.screen import rank_prefix, terminal_variables
from disttrain_launch.streams import Streams
from disttrain_launch.worker import Worker


class Output(Streams):
    """Streams by local rank, as the job's LogPlan has them."""

    def __init__(self, spec: JobSpec, environ: Mapping[str, str], selector: selectors.BaseSelector) -> None:
        super().__init__(selector)
        self._spec = spec
        self._environ = environ

    def worker_variables(self) -> dict[str, str]:
        """Environment variables for workers that write here."""
        return terminal_variables(self.screens)

    def add(self, worker: Worker) -> None:
        """Take over a worker's streams. Raises LaunchError when a log file cannot be written."""
        for stream, fd in ((STDOUT, worker.stdout_fd), (STDERR, worker.stderr_fd)):
            self.add_pump(worker.local_rank, stream, self._make_pump(worker, stream, fd))

    def log_file(self, worker: Worker) -> str:
        """Where the worker's stderr is kept; empty when it is not."""
        logs = self._spec.logs
        if logs.directory is None or not logs.keeps(worker.local_rank, STDERR):
            return ""
        return str(log_path(logs.directory, worker.rank, STREAM_NAMES[STDERR]))

    def _make_pump(self, worker: Worker, stream: int, fd: int) -> StreamPump:
        logs, screen = self._spec.logs, self.screens[stream]
        log_file = None
        if logs.directory is not None and logs.keeps(worker.local_rank, stream):
            log_file = open_log(log_path(logs.directory, worker.rank, STREAM_NAMES[stream]), self._spec.run_id)
        return StreamPump(
            fd,
            screen=screen if logs.shows(worker.local_rank, stream) else None,
            prefix=rank_prefix(worker.rank, self._environ, is_terminal=screen.is_terminal)
            if logs.has_prefixes
            else b"",
            log_file=log_file,
            shows_bar=worker.rank == 0,
            say=self.say,
        )
