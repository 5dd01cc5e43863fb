"""Killed saves leave the old state or the new one, and never a mix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forkserver.process import WRITERS, ForkServer
from tests.forkserver.server import listening


@pytest.mark.sweep(1)
@pytest.mark.parametrize("how", ["exchange", "rename", "steps"])
def test_a_killed_save_leaves_the_old_state_or_the_new(tmp_path: Path, how: str) -> None:
    program = [sys.executable, str(Path(__file__).with_name("killed_saves.py")), str(tmp_path / "saves"), "7", how]
    run = subprocess.run(program, capture_output=True, text=True, timeout=360, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    outcomes = json.loads(run.stdout)
    assert outcomes["old"] > (20 if how == "steps" else 8)
    assert outcomes["new"] > 3
    assert outcomes["lived"] >= (2 if how == "steps" else 1)  # as many as die at each of their operations in turn


@pytest.mark.sweep(0)
def test_killed_training_and_killed_writers_leave_the_old_state_or_the_new(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    program = ["-m", "tests.multirank.killed_async_saves", str(tmp_path / "saves"), "7"]
    with listening("writer") as writers:  # which nobody else asks
        environment = {**os.environ, "DISTTRAIN_CHECKPOINT_ORPHAN_TIMEOUT_S": "3", WRITERS: writers}
        run = fork_server.run(*program, environ=environment, limit_s=110.0)
    assert (run.returncode, run.stderr) == (0, "")
    outcomes = json.loads(run.stdout)
    assert sum(outcomes.values()) == 16
    assert sum(number for outcome, number in outcomes.items() if "lived" not in outcome) > 4


def test_who_is_left_of_a_killed_save_hears_of_it_soon(fork_server: ForkServer, tmp_path: Path) -> None:
    run = fork_server.run("-m", "tests.multirank.survivors", str(tmp_path), environ=os.environ)
    assert (run.returncode, run.stderr) == (0, "")
    outcomes = json.loads(run.stdout)
    assert set(outcomes) == {f"{victim}-{rank}" for victim in range(3) for rank in range(3) if victim != rank}
    for name, (after_s, error) in outcomes.items():
        assert f"save: ranks [{name[0]}] do not answer any more." in error
        assert after_s < 12
