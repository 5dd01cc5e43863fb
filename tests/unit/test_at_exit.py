"""What is called at the end of a process is not called at that of a child which is forked off it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, sys
from disttrain._python import at_exit

class Ending:
    def say(self):
        print("end", flush=True)

first, second, third = Ending(), Ending(), Ending()
at_exit.register(first.say)
at_exit.register(second.say)
at_exit.unregister(second.say)
at_exit.unregister(third.say)
if not os.fork():
    at_exit.register(lambda: print("child", flush=True))
    sys.exit(0)
os.wait()
"""


def test_a_child_that_is_forked_off_says_nothing_for_its_parent() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=True)
    assert ended.stdout.split() == ["child", "end"]
