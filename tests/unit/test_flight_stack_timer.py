"""The timer that writes all stacks goes on behind a fork, and no child waits for its thread."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, sys, tempfile, time
from disttrain.flight_recorder.live.stack_timer import STACK_TIMER

file = tempfile.TemporaryFile()
STACK_TIMER.set(0.5, file)
if not os.fork():
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.wait()[1]))
while not file.tell():
    time.sleep(0.05)
STACK_TIMER.set(60, file)
STACK_TIMER.cancel()
if not os.fork():
    STACK_TIMER.set(60, file)
    if not os.fork():
        sys.exit(4)
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_forks() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=True)
    assert ended.stdout.split() == ["3", "4"]
