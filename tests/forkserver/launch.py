"""disttrain-launch on a warm Python (`warm_python`), from which its workers are forked.

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
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from unittest import mock

from disttrain_launch import cli
from disttrain_launch.workers import worker
from tests.forkserver.server import Script, WarmPython


def _tell_end(pid: int) -> None:
    """The signal that a parent gets: the launcher is none of these workers."""
    process = os.pidfd_open(pid)
    threading.Thread(target=_wait_and_tell, args=(process,), daemon=True).start()


def _wait_and_tell(process: int) -> None:
    select.select([process], [], [])
    os.close(process)
    os.kill(os.getpid(), signal.SIGCHLD)


def main() -> int:
    address, *argv = sys.argv[1:]
    python = WarmPython(address)

    def start(
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int | None,
        stdout: int,
        stderr: int,
        start_new_session: bool,
    ) -> Script:
        assert command[0] == sys.executable
        with open(os.devnull) as nothing:
            streams = (0 if stdin is None else nothing.fileno(), stdout, stderr)
            pid = python.fork(command[1:], env, streams, leads_session=start_new_session)
        script = Script(python, pid)
        _tell_end(pid)
        return script

    stand_in = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    with mock.patch.object(worker, "subprocess", stand_in):
        return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main())
