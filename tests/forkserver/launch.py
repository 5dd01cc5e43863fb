"""disttrain-launch with workers that a fork server forks.

    python tests/forkserver/launch.py ADDRESS FLAGS...

For tests of what is launched. Those of the launcher start workers as it does.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

from disttrain_launch import cli
from disttrain_launch.workers import worker
from tests.forkserver.process import ForkedProcess, ForkServer


def _signal_end(pid: int) -> None:
    """Signal the end of a process as a parent is told of it: the launcher is none of these workers'."""
    process = os.pidfd_open(pid)

    def wait_and_signal() -> None:
        select.select([process], [], [])
        os.close(process)
        os.kill(os.getpid(), signal.SIGCHLD)

    threading.Thread(target=wait_and_signal, daemon=True).start()


def main() -> int:
    address, *argv = sys.argv[1:]
    server = ForkServer(address)

    def start(command: Sequence[str], **options: Any) -> ForkedProcess[bytes]:
        assert command[0] == sys.executable
        process: ForkedProcess[bytes] = ForkedProcess(server, command[1:], **options)
        _signal_end(process.pid)
        return process

    stand_in = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    with mock.patch.object(worker, "subprocess", stand_in):
        return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main())
