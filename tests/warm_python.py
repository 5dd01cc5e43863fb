"""Scripts in processes of their own without two seconds for loading torch: forked from an interpreter that has it.

That interpreter has one thread and has computed nothing. A script begins with its own arguments, variables and streams,
as `__main__`, and ends as any interpreter ends, with all that is done at exit.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

_REQUEST_BYTES = 1 << 20
_STREAMS = 3


class Script:
    """One that runs: what of subprocess.Popen's its users need, with streams of text."""

    def __init__(self, python: WarmPython, pid: int, streams: tuple[IO[str], IO[str], IO[str]]) -> None:
        self.pid = pid
        self.stdin: IO[str] | None
        self.stdin, self.stdout, self.stderr = streams
        self.returncode: int | None = None
        self._python = python
        self._process = os.pidfd_open(pid)

    def wait(self, timeout_s: float) -> int:
        """Its exit code, or minus the signal that ended it. Raises: subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._process], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired(f"script {self.pid}", timeout_s)
            self.returncode = os.waitstatus_to_exitcode(self._python.ask({"wait": self.pid}))
            os.close(self._process)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)

    def close(self) -> None:
        """End it, however it does."""
        self.send_signal(signal.SIGKILL)
        self.wait(timeout_s=10.0)
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


class WarmPython:
    """The interpreter. Leaving its `with` block ends it, and all its scripts."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm_python"],
            stdin=theirs,
            stdout=subprocess.DEVNULL,  # what scripts print is buffered as for a pipe
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)]),
            },
        )
        theirs.close()

    def start(self, script: Path, *arguments: str, environ: Mapping[str, str]) -> Script:
        """Run `script` with all variables of `environ`, in this process's folder."""
        pipes = [os.pipe() for _ in range(_STREAMS)]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        request = {"argv": [str(script), *arguments], "environ": dict(environ), "folder": os.getcwd()}
        try:
            pid = self.ask(request, theirs)
        finally:
            for stream in theirs:
                os.close(stream)
        return Script(self, pid, (os.fdopen(pipes[0][1], "w"), os.fdopen(pipes[1][0]), os.fdopen(pipes[2][0])))

    def ask(self, request: Mapping[str, object], streams: list[int] | None = None) -> int:
        socket.send_fds(self._socket, [json.dumps(request).encode()], streams or [])
        return int(self._socket.recv(_REQUEST_BYTES))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait()


def serve(asked: socket.socket) -> list[str]:
    """Fork a script for each request until nobody asks; returns in the script's process, with its argv."""
    scripts: set[int] = set()
    while True:
        data, streams, _, _ = socket.recv_fds(asked, _REQUEST_BYTES, _STREAMS)
        if not data:
            break
        request = json.loads(data)
        if "wait" in request:
            scripts.remove(request["wait"])
            answer = os.waitpid(request["wait"], 0)[1]
        else:
            answer = os.fork()
            if answer == 0:
                asked.close()
                return _become(request, streams)
            scripts.add(answer)
        for stream in streams:
            os.close(stream)
        asked.sendall(str(answer).encode())
    for pid in scripts:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    sys.exit()


def _become(request: dict[str, Any], streams: list[int]) -> list[str]:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    argv: list[str] = request["argv"]
    return argv


if __name__ == "__main__":
    import disttrain.process_group  # noqa: F401  torch, for all scripts; here, since their tests need none

    gc.collect()
    gc.freeze()  # What is loaded stays: a script's collections, and those at its end, would copy all of it.
    sys.argv = serve(socket.socket(fileno=os.dup(0)))
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
