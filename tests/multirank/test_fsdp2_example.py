"""The FSDP2 example as a person runs it: it says what it will cost, learns, and leaves a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launching import EXAMPLES, launched


@pytest.mark.parametrize(
    ("num_ranks", "mesh", "operations"),
    [
        (2, "dp=2", {"all_gather", "reduce_scatter"}),
        (4, "replicate=2,shard=2", {"all_gather", "reduce_scatter", "all_reduce"}),
    ],
)
def test_it_says_what_it_costs_and_learns(tmp_path: Path, num_ranks: int, mesh: str, operations: set[str]) -> None:
    done = launched(num_ranks, EXAMPLES / "fsdp2.py", "--mesh", mesh, "--out", "saved", folder=tmp_path)
    lines = [line.removeprefix("[rank 0] ") for line in done.stdout.splitlines()]
    assert lines[0].startswith(f"on {mesh.replace(',', ' ')}, each rank; the peak is in the backward of ")
    assert set(re.findall(r"^  (\w+) of 2 ranks", "\n".join(lines), re.MULTILINE)) == operations
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 20
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step-00000020"]
