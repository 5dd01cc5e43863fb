"""`disttrain-flight watch` on a terminal: a table until somebody presses q, and the terminal as it was before."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest


def test_it_ends_by_q(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    watching = subprocess.Popen(
        [sys.executable, "-m", "disttrain.flight_recorder.cli", "watch", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    seen = b""
    while b"q ends" not in seen:
        seen += os.read(ours, 4096)
    assert termios.tcgetattr(theirs)[3] & termios.ICANON == 0
    os.write(ours, b"q")
    # Whoever writes to a terminal that nobody reads waits; what it leaves is little.
    _, errors = watching.communicate(timeout=240)
    assert (watching.returncode, errors) == (0, b"")
    assert termios.tcgetattr(theirs)[3] == before[3]
    os.close(ours)
    os.close(theirs)
