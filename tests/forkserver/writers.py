"""Writers of asynchronous saves without the tenth of a second that each takes to start.

They are forked from a Python (`warm_python`) that has loaded what a writer does, and no torch. Ranks and scripts that
are forked themselves have such writers; tests that run in pytest's own process start them as a job does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from types import SimpleNamespace

from disttrain.checkpoint.async_saving import writer_link
from tests.forkserver.server import Script, WarmPython

_WRITER = "disttrain.checkpoint.async_saving.writer_process"


class _Writer:
    """What of subprocess.Popen is needed of one."""

    def __init__(self, python: WarmPython, pid: int) -> None:
        self.pid = pid
        self._python = python

    def wait(self) -> int:
        with closing(self._python):
            return Script(self._python, self.pid).wait()


def have_warm_writers(address: str) -> None:
    """Whatever starts a writer in this process and its forks gets one from the Python that listens at `address`."""
    writer_link.subprocess = _stand_in(address)  # type: ignore[assignment]


def _stand_in(address: str) -> SimpleNamespace:
    """For the module `subprocess`."""

    def start(
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        stdin: int,
        stdout: int,
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> _Writer:
        assert command[:-1] == [sys.executable, "-P", "-m", _WRITER]
        (connection,) = pass_fds
        assert command[-1] == str(connection)
        python = WarmPython(address)
        with open(os.devnull, "w") as nothing:
            # Its connection is its standard input: other descriptors are not handed on.
            streams = (connection, nothing.fileno(), 2)
            pid = python.fork(["-m", _WRITER, "0"], env, streams, leads_session=start_new_session)
        return _Writer(python, pid)

    return SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
