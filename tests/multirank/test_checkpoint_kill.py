"""Killed saves leave the old state or the new one, and never a mix."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_killed_save_leaves_the_old_state_or_the_new(tmp_path: Path) -> None:
    program = [sys.executable, str(Path(__file__).with_name("killed_saves.py")), str(tmp_path / "saves"), "7"]
    run = subprocess.run(program, capture_output=True, text=True, timeout=100, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    outcomes = json.loads(run.stdout)
    assert outcomes["old"] > 20
    assert outcomes["new"] > 3
    assert outcomes["lived"] >= 2
