"""On a host of a job by ssh: starts the launcher as ordered, passes signals on to it, ends it when ssh ends.

sshd tells nobody on its host when a connection breaks; here the end of standard input does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from typing import Any, BinaryIO

from disttrain import settings
from disttrain_launch.request.job import NOT_STARTED, OPERATION
from disttrain_launch.workers.outcome import Exit

ORDER_WAIT_S = 60.0


def main() -> int:
    """The launcher's exit code."""
    orders = os.fdopen(0, "rb", buffering=0, closefd=False)
    if not select.select([orders], [], [], ORDER_WAIT_S)[0] or not (line := orders.readline()):
        return _refuse("no order came")
    order: dict[str, Any] = json.loads(line)
    try:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "disttrain_launch", *order["arguments"]],
            cwd=order["directory"],
            env={**settings.environment(), **order["variables"]},
            stdin=subprocess.PIPE,
        )
    except OSError as error:
        return _refuse(f"the working directory {order['directory']} cannot be used: {error.strerror}")
    assert launcher.stdin is not None, "it was asked for"
    launcher.stdin.write(order["token"].encode() + b"\n")
    launcher.stdin.close()
    threading.Thread(target=_pass_on, args=(orders, launcher), daemon=True).start()
    return Exit(launcher.wait()).exit_code


def _pass_on(orders: BinaryIO, launcher: subprocess.Popen[bytes]) -> None:
    for line in orders:
        launcher.send_signal(int(line))
    launcher.send_signal(signal.SIGTERM)


def _refuse(problem: str) -> int:
    print(f"{OPERATION}: {problem} [host {os.uname().nodename}]", file=sys.stderr, flush=True)
    return NOT_STARTED


if __name__ == "__main__":
    sys.exit(main())
