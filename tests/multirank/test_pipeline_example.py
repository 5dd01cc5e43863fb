"""The pipeline example as a person runs it: the same losses on any number of ranks, whatever the schedule."""

from __future__ import annotations

import re

import pytest

from tests.launching import EXAMPLES, launched

NAMES = ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]

Numbers = list[tuple[float, float]]
"""Loss and norm of the gradients of each step."""


def output_on(num_ranks: int) -> str:
    return launched(num_ranks, EXAMPLES / "pipeline.py", "--schedule", "1F1B", "Interleaved1F1B", "ZBV").stdout


def numbers_in(output: str) -> dict[str, Numbers]:
    """By schedule."""
    found: dict[str, Numbers] = {}
    for name, loss, norm in re.findall(r"(\w+), step \d: loss ([\d.]+), norm of the gradients ([\d.]+)", output):
        found.setdefault(name, []).append((float(loss), float(norm)))
    return found


@pytest.fixture(scope="module")
def output_alone() -> str:
    return output_on(1)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_it_trains_as_one_rank_does(output_alone: str, num_ranks: int) -> None:
    expected = numbers_in(output_alone)["1F1B"]  # of one stage, which is the model
    assert len(expected) == 8
    assert expected[-1][0] < 0.7 * expected[0][0]
    output = output_alone if num_ranks == 1 else output_on(num_ranks)
    found = numbers_in(output)
    assert sorted(found) == NAMES
    for name in NAMES:
        assert [pair[0] for pair in found[name]] == pytest.approx([pair[0] for pair in expected], rel=1e-4)
        assert [pair[1] for pair in found[name]] == pytest.approx([pair[1] for pair in expected], rel=1e-4)
        assert len(re.findall(rf"\b{name} · {num_ranks} ranks? x ", output)) == 1  # the picture
