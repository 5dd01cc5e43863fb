"""The tensor-parallel example as a person runs it: it trains as one rank does, and sends what its plan says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def output_on(num_ranks: int) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DISTTRAIN_", "OMP_"))}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "launcher")])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "disttrain_launch", "--standalone", "--nproc-per-node", str(num_ranks)),
            str(ROOT / "examples" / "tp.py"),
        ],
        env={**kept, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return done.stdout


def losses_in(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+), norm", output)]


@pytest.fixture(scope="module")
def losses_alone() -> list[float]:
    return losses_in(output_on(1))


@pytest.mark.parametrize(("num_ranks", "num_tokens"), [(2, 512), (4, 256)])
def test_it_trains_as_one_rank_does(losses_alone: list[float], num_ranks: int, num_tokens: int) -> None:
    output = output_on(num_ranks)
    losses = losses_in(output)
    assert len(losses) == 20
    assert losses[-1] < 0.7 * losses[0]
    assert losses == pytest.approx(losses_alone, rel=1e-3)

    (found,) = re.findall(r"counted: ([\d,]+) bytes; the plan says ([\d,]+), and the loss sends ([\d,]+)", output)
    counted, planned, of_loss = (int(number.replace(",", "")) for number in found)
    assert counted == planned + of_loss
    # Two pairs in each of two blocks, embedding and head: each is a gather and a scatter of 64 numbers per token.
    assert planned == 10 * 64 * num_tokens * 4
    assert f"a rank of 2 sends {planned / 1e3:.1f} KB in a step of {num_tokens} tokens" in output
    assert re.search(r"\] all_reduce +5 ", output)
