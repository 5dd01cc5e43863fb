"""The job's token handed over on standard input, for whoever starts launchers on other hosts: `--token-file -`.

So it stands in no argument list, no environment and no file that hosts share. Only its line is read; what comes after
it is the first worker's.
"""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

from disttrain.errors import LaunchError
from disttrain_launch.request.job import OPERATION

STDIN = Path("-")
MAX_BYTES = 4096


def read_handed_token(wait_s: float, fd: int = 0) -> str:
    """The first line that comes on `fd`. Raises LaunchError when none does within `wait_s`."""
    until_s = time.monotonic() + wait_s
    line = b""
    while not line.endswith(b"\n") and len(line) < MAX_BYTES:
        if not select.select([fd], [], [], max(until_s - time.monotonic(), 0.0))[0]:
            raise _no_token(f"nothing within {wait_s:g} s")
        if not (byte := os.read(fd, 1)):
            break
        line += byte
    if not line.strip():
        raise _no_token("an empty line" if line else "its end")
    return line.decode("utf-8", "replace").strip()


def _no_token(what_came: str) -> LaunchError:
    return LaunchError(
        OPERATION,
        f"--token-file - waits for the job's token on standard input, where {what_came} came.",
        f"Pipe one line into every node's launcher: {OPERATION} --new-token - makes one.",
    )
