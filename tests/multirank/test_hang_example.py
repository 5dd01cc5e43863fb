"""The example that hangs, as a person runs it: launcher, analyzer and page name the rank and the line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from disttrain.flight_recorder.analysis.verdict import Kind
from disttrain.flight_recorder.cli import main
from tests.surroundings.launching import EXAMPLES, launched

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer

SCRIPT = EXAMPLES / "hang.py"


def test_it_says_why_it_hangs(tmp_path: Path, fork_server: ForkServer) -> None:
    done = launched(3, "--log-dir", tmp_path / "logs", SCRIPT, check=False, server=fork_server)
    lines = SCRIPT.read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("# the end of the road"))
    assert done.returncode != 0
    (found,) = [text for text in done.stderr.splitlines() if text.startswith("disttrain-launch: flight recorder: ")]
    assert "Rank 1 did not come to all_reduce #399 of group world" in found
    assert f"examples/hang.py:{line} in next_batch" in found
    assert re.search(
        r"step 150: [\d.]+ ms each on 3 ranks, \d+% of it waiting for communication; the latest is rank [0-2]",
        done.stdout,
    )

    page = tmp_path / "hang.html"
    assert main([str(tmp_path / "logs" / "flight"), "--html", str(page)]) == Kind.RANK_ABSENT.exit_code
    assert f"hang.py:{line} in next_batch" in page.read_text()
