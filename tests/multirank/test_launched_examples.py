"""Examples that need a launcher, as a person runs them: one that dies and goes on, one with a transport of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tests.surroundings.launching import EXAMPLES, launched

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer


def test_elastic(tmp_path: Path, fork_server: ForkServer) -> None:
    argv = ("--max-restarts", "1", EXAMPLES / "elastic.py", "--out", "saves")
    done = launched(2, *argv, folder=tmp_path, server=fork_server)
    assert "killed by SIGKILL" in done.stderr
    assert "restart 1 of 1" in done.stderr
    begun = re.findall(r"attempt (\d): 2 ranks begin at step (\d)", done.stdout)
    assert begun == [("0", "0"), ("1", "4")]
    steps = re.findall(r"step (\d): loss ([\d.]+)", done.stdout)
    assert [int(step) for step, _ in steps] == [0, 1, 2, 3, 4, 4, 5, 6, 7]
    assert len(set(steps)) == 8  # the step that was done twice had the same loss
    assert sorted(path.name for path in (tmp_path / "saves").iterdir()) == ["step-00000006", "step-00000008"]


def test_backend(fork_server: ForkServer) -> None:
    output = launched(2, EXAMPLES / "backend.py", server=fork_server).stdout
    losses = dict(re.findall(r"cpu:(\w+): losses (.*)", output))
    assert sorted(losses) == ["gloo", "post"]
    assert losses["gloo"] == losses["post"]
