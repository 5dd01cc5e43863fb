"""Writers of asynchronous saves without the tenth of a second that each takes to start.

They are forked by a server that has loaded what a writer does, and no torch. Ranks and scripts that are forked
themselves have such writers; tests that run in pytest's own process start them as a job does.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

from disttrain.checkpoint.async_saving import writer_link
from tests.forkserver.process import ForkedProcess, ForkServer

_WRITER = "disttrain.checkpoint.async_saving.writer_process"


class _Writer(ForkedProcess[bytes]):
    def wait(self, timeout: float | None = None) -> int:
        with closing(self._server):
            return super().wait(timeout)


def fork_writers(address: str) -> None:
    """Have all writers that this process and its forks start be forked by the server at `address`."""

    def start(command: Sequence[str], *, pass_fds: Sequence[int], stdin: int, **options: Any) -> _Writer:
        assert command[:-1] == [sys.executable, "-P", "-m", _WRITER]
        (connection,) = pass_fds
        assert (command[-1], stdin) == (str(connection), subprocess.DEVNULL)
        # Its connection is its standard input: other descriptors are not handed on.
        return _Writer(ForkServer(address), ["-m", _WRITER, "0"], stdin=connection, **options)

    stand_in = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    writer_link.subprocess = stand_in  # type: ignore[assignment]
