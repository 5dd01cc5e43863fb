"""A process that outlives its agent just long enough to clean up after it.

The agent may be killed with SIGKILL, and then can do nothing any more. The warden is forked from it before anything
else is started, in a session of its own, and blocks on a pipe whose other end only the agent holds: when the pipe ends
without a farewell, the warden stops the workers and all their children, keeps what tells why they ended, and removes
the agent's folders.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from disttrain_launch.workers.leftovers import stop_leftovers

_FAREWELL = b"farewell"
_NONE = b"none\n"


class Warden:
    """Made once per agent, before any thread runs.

    Args: agent  its name;  folders  of its temporary files;  grace_s  from SIGTERM to SIGKILL;  keep  saves what is to
          be kept of them, and may fail.
    """

    def __init__(self, agent: str, folders: Sequence[Path], grace_s: float, keep: Callable[[], None]) -> None:
        assert threading.active_count() == 1, "a process with threads must not fork"
        read_fd, self._write_fd = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._write_fd)
            _watch(read_fd, agent, folders, grace_s, keep)
        os.close(read_fd)

    def ended(self) -> None:
        """Forget the workers told so far; they are gone, and others may get their numbers."""
        self._write(_NONE)

    def started(self, worker_pid: int) -> None:
        """Tell of a worker; it leads a session."""
        self._write(f"{worker_pid}\n".encode())

    def close(self) -> None:
        """Let the warden go: nothing is left to be cleaned up."""
        self._write(_FAREWELL)
        os.close(self._write_fd)
        os.waitpid(self._pid, 0)

    def _write(self, data: bytes) -> None:
        try:
            os.write(self._write_fd, data)
        except BrokenPipeError:
            pass  # Somebody killed the warden; the agent still cleans up unless it is killed as well.


def _watch(read_fd: int, agent: str, folders: Sequence[Path], grace_s: float, keep: Callable[[], None]) -> None:
    """The warden's whole life; never returns."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        # Whoever reads the launcher's output must see its end when the launcher ends.
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard_fd in (0, 1, 2):
            os.dup2(nothing, standard_fd)
        message = b""
        while data := os.read(read_fd, 65536):
            message += data
        if not message.endswith(_FAREWELL):
            stop_leftovers(agent, {int(pid) for pid in message.rpartition(_NONE)[2].split()}, grace_s)
            with suppress(Exception):
                keep()
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(0)
