"""The tensor-parallel example as a person runs it: it trains as one rank does, and sends what its plan says."""

from __future__ import annotations

import re

import pytest

from tests.launching import EXAMPLES, launched


def losses_in(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+), norm", output)]


@pytest.fixture(scope="module")
def losses_alone() -> list[float]:
    return losses_in(launched(1, EXAMPLES / "tp.py").stdout)


@pytest.mark.parametrize(("num_ranks", "num_tokens"), [(2, 512), (4, 256)])
def test_it_trains_as_one_rank_does(losses_alone: list[float], num_ranks: int, num_tokens: int) -> None:
    output = launched(num_ranks, EXAMPLES / "tp.py").stdout
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
