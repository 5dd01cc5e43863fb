"""All streams of a node's workers, and the screen they share, as part of the agent's event loop."""

from __future__ import annotations

import selectors
from collections.abc import Mapping

from disttrain_launch.job import STDERR, STDOUT, STREAM_NAMES, JobSpec
from disttrain_launch.logs import StreamPump, log_path, open_log
from disttrain_launch.screen import Outlet, make_screens, rank_prefix, terminal_variables
from disttrain_launch.worker import Worker


class Output:
    """Pumps and screens, registered with the loop's `selector`: the loop calls `balance` before it waits, and `move`
    for every ready pump or outlet."""

    def __init__(self, spec: JobSpec, environ: Mapping[str, str], selector: selectors.BaseSelector) -> None:
        self._spec = spec
        self._environ = environ
        self._selector = selector
        self._screens = make_screens()
        self._outlets = {screen.outlet for screen in self._screens.values()}
        self._pumps: dict[tuple[int, int], StreamPump] = {}
        self._is_paused = False

    def worker_variables(self) -> dict[str, str]:
        """Environment variables for workers that write here."""
        return terminal_variables(self._screens)

    def add(self, worker: Worker) -> None:
        """Take over a worker's streams. Raises LaunchError when a log file cannot be written."""
        for stream, fd in ((STDOUT, worker.stdout_fd), (STDERR, worker.stderr_fd)):
            pump = self._make_pump(worker, stream, fd)
            self._pumps[worker.local_rank, stream] = pump
            self._selector.register(fd, selectors.EVENT_READ, pump)

    def move(self, ready: StreamPump | Outlet) -> None:
        """Move bytes of a pump or outlet that the selector found ready."""
        if isinstance(ready, Outlet):
            ready.flush(0)
            return
        ready.read_some()
        if ready.is_over:
            self._selector.unregister(ready.fd)
            ready.close()

    def balance(self) -> None:
        """Read no more from workers than the screen takes; wait for the screen only while something waits for it."""
        registered = self._selector.get_map()
        for outlet in self._outlets:
            if outlet.is_waiting and outlet.fd not in registered:
                self._selector.register(outlet.fd, selectors.EVENT_WRITE, outlet)
            elif not outlet.is_waiting and outlet.fd in registered:
                self._selector.unregister(outlet.fd)
        if any(outlet.is_congested for outlet in self._outlets):
            self._pause()
        elif self._is_paused and not any(outlet.is_waiting for outlet in self._outlets):
            self._resume()

    def drain(self, local_rank: int) -> str:
        """Move what an ended worker left in its pipes; returns the end of its stderr."""
        for stream in (STDOUT, STDERR):
            self._pumps[local_rank, stream].drain()
        return self._pumps[local_rank, STDERR].tail

    def log_file(self, worker: Worker) -> str:
        """Where the worker's stderr is kept; empty when it is not."""
        logs = self._spec.logs
        if logs.directory is None or not logs.keeps(worker.local_rank, STDERR):
            return ""
        return str(log_path(logs.directory, worker.rank, STREAM_NAMES[STDERR]))

    def say(self, text: str) -> None:
        """A message of the launcher's own, whole lines, after what workers have printed so far."""
        if text:
            self._screens[STDERR].show_lines(b"", text.encode("utf-8", "replace"))

    def end_workers(self) -> None:
        """Move the rest; the workers are gone. Others may follow."""
        for pump in self._pumps.values():
            if pump.fd in self._selector.get_map():
                self._selector.unregister(pump.fd)
            pump.drain()
            pump.close()
        self._pumps.clear()
        self._is_paused = False
        for screen in self._screens.values():
            screen.restore()

    def flush(self) -> None:
        """Wait until the screen has taken everything."""
        for outlet in self._outlets:
            outlet.flush(None)

    def _make_pump(self, worker: Worker, stream: int, fd: int) -> StreamPump:
        logs, screen = self._spec.logs, self._screens[stream]
        log_file = None
        if logs.directory is not None and logs.keeps(worker.local_rank, stream):
            log_file = open_log(log_path(logs.directory, worker.rank, STREAM_NAMES[stream]), self._spec.run_id)
        return StreamPump(
            fd,
            screen=screen if logs.shows(worker.local_rank, stream) else None,
            prefix=rank_prefix(worker.rank, self._environ, is_terminal=screen.is_terminal),
            log_file=log_file,
            shows_bar=worker.rank == 0,
            say=self.say,
        )

    def _pause(self) -> None:
        if self._is_paused:
            return
        self._is_paused = True
        for pump in self._pumps.values():
            if not pump.is_over:
                self._selector.unregister(pump.fd)

    def _resume(self) -> None:
        self._is_paused = False
        for pump in self._pumps.values():
            if not pump.is_over:
                self._selector.register(pump.fd, selectors.EVENT_READ, pump)
