"""One worker: a process in a session of its own, and how it ended as a value."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Mapping

from disttrain.errors import LaunchError
from disttrain_launch.request.job import OPERATION
from disttrain_launch.workers.outcome import Exit

_UNUSABLE = (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.EPERM)


class Worker:
    """A started worker. `stdout_fd` and `stderr_fd` are the reading ends of its pipes, non-blocking; whoever reads
    them closes them.

    Args: command, environ  of the process;  rank, local_rank  what it is; local rank 0 alone gets the
          launcher's stdin.
    Raises: LaunchError when the program cannot be run, OSError when the machine is short of something.
    """

    def __init__(self, command: tuple[str, ...], environ: Mapping[str, str], *, rank: int, local_rank: int) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.started_s = time.monotonic()
        self.stdout_fd, worker_stdout = os.pipe()
        self.stderr_fd, worker_stderr = os.pipe()
        os.set_blocking(self.stdout_fd, False)
        os.set_blocking(self.stderr_fd, False)
        try:
            self._process = subprocess.Popen(
                command,
                env=environ,
                # One reader at most: the first worker, so that a debugger can be talked to.
                stdin=None if local_rank == 0 else subprocess.DEVNULL,
                stdout=worker_stdout,
                stderr=worker_stderr,
                start_new_session=True,
            )
        except OSError as error:
            os.close(self.stdout_fd)
            os.close(self.stderr_fd)
            if error.errno not in _UNUSABLE:
                raise
            raise LaunchError(
                OPERATION, f"{command[0]} cannot be run: {error.strerror}.", "Check path and mode."
            ) from None
        finally:
            os.close(worker_stdout)
            os.close(worker_stderr)
        self.pid = self._process.pid

    def poll(self) -> Exit | None:
        """The worker's end; None while it runs. Never waits."""
        returncode = self._process.poll()
        return None if returncode is None else Exit(returncode)

    def send(self, number: int, *, with_children: bool) -> None:
        """Signal the worker, or its whole process group; nothing happens once it has been found ended."""
        if self._process.returncode is not None:
            return
        if with_children:
            os.killpg(self.pid, number)  # Not reaped yet, so the group's number is still its own.
        else:
            os.kill(self.pid, number)
