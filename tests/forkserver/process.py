"""A fork server's client: asks it for processes that are as `python ARGUMENTS...` would start them.

Such a process has all that subprocess.Popen has: pipes, timeouts, signals, communicate. Only how it is started, and how
one learns that it has ended, is not the standard library's.
"""

from __future__ import annotations

import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, AnyStr

REQUEST_BYTES = 1 << 20

WRITERS = "DISTTRAIN_TEST_WRITERS"
"""A variable of what is forked with torch: where writers of saves are forked from."""

_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
"""Both ends of each, as Popen calls them."""


class ForkServer:
    """The one that listens at `address`, an abstract name of a Unix socket. Any process may ask it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(f"\0{address}")
        self._asking = threading.Lock()

    def start(self, *arguments: str | Path, environ: Mapping[str, str]) -> ForkedProcess[str]:
        """Run `python *arguments` with pipes as streams, and with these variables alone."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return ForkedProcess(self, arguments, env=environ, text=True, **pipes)

    def run(
        self, *arguments: str | Path, environ: Mapping[str, str], limit_s: float = 360.0
    ) -> subprocess.CompletedProcess[str]:
        """Run `python *arguments` to its end, without an input."""
        # Its output goes to files: what it leaves running may hold them open, and pipes would be waited for.
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
            process: ForkedProcess[str] = ForkedProcess(self, arguments, env=environ, **streams)
            try:
                returncode = process.wait(limit_s)
            finally:
                process.close()
            for stream in (stdout, stderr):
                stream.seek(0)
            return subprocess.CompletedProcess(arguments, returncode, stdout.read(), stderr.read())

    def settle(self, variables: Mapping[str, str]) -> None:
        """Wait until all that was forked with such variables has ended."""
        while self.ask({"living": dict(variables)}):
            time.sleep(0.01)

    def find(self, variables: Mapping[str, str]) -> int:
        """The pid of what was forked last with such variables."""
        return self.ask({"find": dict(variables)})

    def ask(self, request: Mapping[str, object], streams: Sequence[int] = ()) -> int:
        """The server's answer to one of its requests, with descriptors that go along."""
        answer = b""
        with self._asking, suppress(ConnectionError):
            socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
            answer = self._socket.recv(REQUEST_BYTES)
        if not answer:
            raise EOFError("The Python that tests are forked from has ended; it says on stderr why it did.")
        return int(answer)

    def close(self) -> None:
        self._socket.close()


class ForkedProcess(subprocess.Popen[AnyStr]):
    """As `subprocess.Popen([sys.executable, *arguments], **options)`.

    Args: arguments  a script's, or -m's or -c's, perhaps behind -u;
          options    Popen's about streams, text, `cwd`, `env` and `start_new_session`.
    """

    def __init__(self, server: ForkServer, arguments: Sequence[str | Path], **options: Any) -> None:
        self._server = server
        super().__init__([sys.executable, *map(str, arguments)], **options)

    def close(self) -> None:
        """Kill it if it still runs, and close its pipes."""
        self.kill()
        self.wait(60.0)
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def _execute_child(self, *arguments: Any) -> None:
        """Popen's own, with what it has made of its arguments; of descriptors, -1 is none."""
        values = inspect.signature(super()._execute_child).bind(*arguments).arguments
        theirs = (values["p2cread"], values["c2pwrite"], values["errwrite"])
        request = {
            "arguments": values["args"][1:],
            "environ": dict(os.environ if values["env"] is None else values["env"]),
            "folder": os.path.abspath(values["cwd"] or "."),
            "leads": values["start_new_session"],
            "ignored": [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN],
        }
        streams = [number if stream == -1 else stream for number, stream in enumerate(theirs)]
        self.pid = self._server.ask(request, streams)
        self._child_created = True
        self._process = os.pidfd_open(self.pid)
        # Popen's child leads its session before Popen returns; a fork begins to when it is scheduled.
        while values["start_new_session"] and os.getpgid(self.pid) != self.pid:
            time.sleep(0.001)
        self._close_pipe_fds(*(values[name] for name in _PIPES))

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """As os.waitpid does: of the parent, which is the server."""
        if not select.select([self._process], [], [], 0.0 if wait_flags & os.WNOHANG else None)[0]:
            return 0, 0
        status = self._server.ask({"wait": self.pid})
        os.close(self._process)
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None, **_others: object) -> int | None:
        """`_deadstate`: nobody will ask for this process again."""
        if _deadstate is None and self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG) if self.returncode is None else (0, 0)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode
