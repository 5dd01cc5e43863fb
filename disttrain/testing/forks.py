"""A pool's workers, and the process that they are forked from (`rank_parent`)."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from enum import IntEnum
from typing import IO, Final

from disttrain.settings import environment

_ANSWER_S: Final = 300.0
"""The time that the parent may take for an answer. Before the first one it loads torch, perhaps on a busy machine."""

_END_S: Final = 30.0
"""The time that it may take to end its workers and itself."""

_MODULES_BYTES: Final = 1 << 15
"""The bytes that faulthandler's list of modules may take."""

FRAME: Final = struct.Struct(">Bqq")
"""A request to the parent, or its answer: what is done, the request's number, and the worker's pid."""


class Request(IntEnum):
    FORK = 0
    """With the worker's three standard streams as descriptors."""
    END = 1
    """Kill the worker, and wait for it: until then its pid is nobody else's."""


class RankParent:
    """Starts the process that workers are forked from. It ends, with all of them, when this is closed."""

    def __init__(self) -> None:
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by close
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._socket, worker_end = socket.socketpair()
        self._socket.settimeout(_ANSWER_S)
        path = os.pathsep.join(path for path in sys.path if path)
        with worker_end:
            self._process = self._start(worker_end, {**environment(), "OMP_NUM_THREADS": "1", "PYTHONPATH": path})

    def _start(self, requests: socket.socket, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Its process, which has our socket's other end as standard input."""
        command = [sys.executable, "-m", "disttrain.testing.rank_parent"]
        return subprocess.Popen(command, stdin=requests.fileno(), stderr=self.log, env=variables)

    def fork(self) -> Worker:
        """A new worker. Raises ConnectionError when the parent has gone, or does not answer."""
        with ExitStack() as theirs, ExitStack() as ours:
            read_tasks, tasks = map(os.fdopen, os.pipe(), ("rb", "wb"))
            answers, write_answers = map(os.fdopen, os.pipe(), ("rb", "wb"))
            log = ours.enter_context(tempfile.TemporaryFile())
            for stream in (read_tasks, write_answers):
                theirs.enter_context(stream)
            for stream in (tasks, answers):
                ours.enter_context(stream)
            streams = [stream.fileno() for stream in (read_tasks, write_answers, log)]
            worker = Worker(self, self._ask(Request.FORK, 0, streams), tasks, answers, log)
            ours.pop_all()
        return worker

    def end(self, pid: int) -> None:
        self._ask(Request.END, pid)

    def close(self) -> None:
        self._socket.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.log.close()

    def _ask(self, request: Request, pid: int, streams: Sequence[int] = ()) -> int:
        with self._lock:
            number = next(self._numbers)
            try:
                socket.send_fds(self._socket, [FRAME.pack(request, number, pid)], streams)
                while data := self._socket.recv(FRAME.size):
                    _, answered, worker = FRAME.unpack(data)
                    # Not to a request that was interrupted while it waited for its own.
                    if answered == number:
                        return int(worker)
            except TimeoutError:
                # So that nobody waits for it again.
                self._socket.shutdown(socket.SHUT_RDWR)
                problem = f"the process that workers are forked from has not answered for {_ANSWER_S:.0f} s"
                raise ConnectionAbortedError(problem) from None
            except ConnectionError:
                pass
        raise ConnectionResetError("the process that workers are forked from has gone")


class RankParents:
    """Those of a pool and of the pools beside it; `start` starts each when it is first needed."""

    def __init__(self, start: Callable[[], RankParent] = RankParent) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._parents: list[RankParent] = []

    def first(self, num_parents: int) -> list[RankParent]:
        with self._lock:
            self._parents += [self._start() for _ in range(len(self._parents), num_parents)]
            return self._parents[:num_parents]

    def said(self) -> str:
        """The ends of their logs."""
        return "".join(tail(parent.log) for parent in self._parents)

    def close(self) -> None:
        """End them, with all workers. Those that are needed later are started anew."""
        with self._lock:
            for parent in self._parents:
                parent.close()
            self._parents = []


class Worker:
    """One forked process, this side's ends of its pipes, and what it prints."""

    def __init__(self, parent: RankParent, pid: int, tasks: IO[bytes], answers: IO[bytes], log: IO[bytes]) -> None:
        self.parent, self.pid, self.tasks, self.answers, self.log = parent, pid, tasks, answers, log
        self._process = os.fdopen(os.pidfd_open(pid), "rb", buffering=0)

    def dump_stacks(self) -> None:
        """Have faulthandler write them to the log, from a signal handler."""
        self._signal(signal.SIGUSR1)

    def kill(self) -> None:
        if self._process.closed:
            return
        try:
            self.parent.end(self.pid)
        except OSError:
            # The parent has gone, or was closed for a pool beside this one. It takes its workers along, unless it was
            # killed.
            self._signal(signal.SIGKILL)
        for stream in (self.tasks, self.answers, self.log, self._process):
            try:
                stream.close()
            except BrokenPipeError:
                continue  # a task that was not read any more

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process.fileno(), number)


def tail(log: IO[bytes], num_bytes: int = 8000) -> str:
    """The end of what was written to it, without faulthandler's list of modules, which may be longer than all else."""
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - _MODULES_BYTES - num_bytes))
    said = log.read().decode(errors="replace")
    return re.sub(r"^Extension modules: .*", "", said, flags=re.MULTILINE)[-num_bytes:]
