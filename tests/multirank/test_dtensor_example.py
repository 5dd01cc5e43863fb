"""The DTensor example as a person runs it: it trains as one process does, and shows what was sent and lies where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launching import EXAMPLES, launched


@pytest.mark.parametrize(("num_ranks", "mesh_shape"), [(2, (1, 2)), (4, (2, 2))])
def test_it_trains_as_one_process_does(tmp_path: Path, num_ranks: int, mesh_shape: tuple[int, int]) -> None:
    output = launched(num_ranks, EXAMPLES / "dtensor.py", folder=tmp_path).stdout
    losses = [tuple(map(float, pair)) for pair in re.findall(r"loss ([\d.]+) in one process, ([\d.]+) on", output)]
    assert len(losses) == 5
    assert losses[-1][0] < losses[0][0] / 10
    assert all(one == pytest.approx(other, rel=1e-4) for one, other in losses)
    (num_calls,) = map(int, re.findall(r"] all +(\d+) ", output))
    assert 0 < num_calls < 15
    dp, tp = mesh_shape
    assert f"[Replicate(), Shard(0)] on dp={dp} tp={tp}" in output
    assert re.search(r"32:64 +1" + (", 3" if dp == 2 else ""), output)
    (difference,) = re.findall(r"it is within (\S+) of", output)
    assert float(difference) < 1e-5
