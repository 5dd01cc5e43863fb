"""Jobs whose processes die, stop, hang and fail at random, each in namespaces of its own: nothing of them is left.

Some of the many that `python -m tests.launch_faults` plays.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.launch_faults.plan import draw
from tests.launch_faults.running import play_seed, unshare
from tests.surroundings.programs import program

SEEDS = (0, 3, 5, 6, 9, 11, 20, 36, 65, 117)


@pytest.fixture(autouse=True)
def namespaces() -> None:
    for name in ("unshare", "mount"):
        program(name, "util-linux")
    program("ip", "iproute2")
    if subprocess.run([*unshare(), "true"], check=False, capture_output=True).returncode:
        pytest.skip("namespaces cannot be made here")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: str(draw(seed)))
def test_a_job_ends_as_it_should_and_leaves_nothing(tmp_path: Path, seed: int) -> None:
    result = play_seed(seed, tmp_path)
    assert result.wrong == [], result
