"""A pool's workers, and the process that they are forked from (`rank_parent`)."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from enum import IntEnum
from typing import IO, Final

from disttrain.settings import environment

FRAME: Final = struct.Struct(">Bq")
"""A request to the parent, or its answer: what is done, and the worker's pid."""


class Request(IntEnum):
    FORK = 0
    """With the worker's three standard streams as descriptors."""
    END = 1
    """Kill the worker, and wait for it: until then its pid is nobody else's."""


class RankParent:
    """Starts the process that workers are forked from. It ends, with all of them, when this is closed."""

    def __init__(self) -> None:
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by close
        self._socket, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "disttrain.testing.rank_parent"],
            stdin=theirs.fileno(),
            stderr=self.log,
            env={
                **environment(),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
        )
        theirs.close()

    def fork(self) -> Worker:
        """A new worker. Raises ConnectionError when the parent has gone."""
        with ExitStack() as theirs, ExitStack() as ours:
            read_tasks, tasks = map(os.fdopen, os.pipe(), ("rb", "wb"))
            answers, write_answers = map(os.fdopen, os.pipe(), ("rb", "wb"))
            log = ours.enter_context(tempfile.TemporaryFile())
            for stream in (read_tasks, write_answers):
                theirs.enter_context(stream)
            for stream in (tasks, answers):
                ours.enter_context(stream)
            streams = [stream.fileno() for stream in (read_tasks, write_answers, log)]
            socket.send_fds(self._socket, [FRAME.pack(Request.FORK, 0)], streams)
            worker = Worker(self, self._answer(), tasks, answers, log)
            ours.pop_all()
        return worker

    def end(self, pid: int) -> None:
        self._socket.sendall(FRAME.pack(Request.END, pid))
        self._answer()

    def close(self) -> None:
        self._socket.close()
        self._process.wait()
        self.log.close()

    def _answer(self) -> int:
        if not (data := self._socket.recv(FRAME.size)):
            raise ConnectionResetError("the process that workers are forked from has gone")
        pid: int = FRAME.unpack(data)[1]
        return pid


class Worker:
    """One forked process, this side's ends of its pipes, and what it prints."""

    def __init__(self, parent: RankParent, pid: int, tasks: IO[bytes], answers: IO[bytes], log: IO[bytes]) -> None:
        self.parent, self.pid, self.tasks, self.answers, self.log = parent, pid, tasks, answers, log

    def dump_stacks(self) -> None:
        """Have faulthandler write them to the log, from a signal handler."""
        os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        with suppress(ConnectionError):  # The parent has gone, and has taken its workers along.
            self.parent.end(self.pid)
        for stream in (self.tasks, self.answers, self.log):
            try:
                stream.close()
            except BrokenPipeError:
                continue  # a task that was not read any more


def tail(log: IO[bytes], num_bytes: int = 4000) -> str:
    """What was last written to it."""
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - num_bytes))
    return log.read().decode(errors="replace")
