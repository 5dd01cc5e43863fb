"""Stands in for `python ARGUMENTS...` where a program of others starts it: has a fork server fork that.

    python tests/forkserver/client.py ADDRESS ARGUMENTS...

It passes signals on, and ends as the fork ends.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[2])

from tests.forkserver.process import ForkedProcess, ForkServer  # noqa: E402

PASSED_ON = (signal.SIGINT, signal.SIGTERM)


def main() -> int:
    address, *arguments = sys.argv[1:]
    process: ForkedProcess[bytes] = ForkedProcess(ForkServer(address), arguments)
    for number in PASSED_ON:
        signal.signal(number, lambda came, _: process.send_signal(came))
    exit_code = process.wait()
    if exit_code < 0:
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
