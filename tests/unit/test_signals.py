"""A helper process is not ended by what a scheduler sends to all processes of a job, at no moment of its life."""

from __future__ import annotations

import signal
import subprocess
import sys

from disttrain._python.signals import TO_ALL, blocked_for_a_helper

HELPER = """
import sys
print("begun", flush=True)
sys.stdin.readline()
from disttrain._python.signals import ignore_all
ignore_all()
print("ready", flush=True)
sys.stdin.readline()
print("lives", flush=True)
"""


def test_a_helper_outlives_signals_to_all_from_its_start() -> None:
    with blocked_for_a_helper():
        helper = subprocess.Popen(
            [sys.executable, "-c", HELPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(TO_ALL)
    assert helper.stdout is not None
    assert helper.stdin is not None
    said = []
    for _ in range(2):
        said.append(helper.stdout.readline())
        for number in TO_ALL:
            helper.send_signal(number)
        helper.stdin.write("\n")
        helper.stdin.flush()
    said.append(helper.stdout.readline())
    assert said == ["begun\n", "ready\n", "lives\n"]
    assert helper.wait(120) == 0
    helper.stdin.close()
    helper.stdout.close()
