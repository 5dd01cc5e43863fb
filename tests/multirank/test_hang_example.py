"""The example that hangs, as a person runs it: launcher, analyzer and page name the rank and the line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from disttrain.flight_recorder.cli import main
from disttrain.flight_recorder.verdict import Kind

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "hang.py"


def test_it_says_why_it_hangs(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DISTTRAIN_", "OMP_"))}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "launcher")])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "disttrain_launch", "--standalone", "--nproc-per-node", "3"),
            *("--log-dir", str(tmp_path / "logs"), str(SCRIPT)),
        ],
        env={**kept, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    lines = SCRIPT.read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("# the end of the road"))
    assert done.returncode != 0
    (found,) = [text for text in done.stderr.splitlines() if text.startswith("disttrain-launch: flight recorder: ")]
    assert "Rank 1 did not come to all_reduce #399 of group world" in found
    assert f"examples/hang.py:{line} in next_batch" in found
    assert "'step': 150, 'num_steps': 50, 'num_ranks': 3" in done.stdout

    page = tmp_path / "hang.html"
    assert main([str(tmp_path / "logs" / "flight"), "--html", str(page)]) == Kind.RANK_ABSENT.exit_code
    assert f"hang.py:{line} in next_batch" in page.read_text()
