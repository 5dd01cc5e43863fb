"""Ranks as threads do what ranks over Gloo do."""

from __future__ import annotations

import pytest

from disttrain.testing import run_threads
from tests.collective_cases import CASES


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("case", list(CASES))
def test_by_threads(case: str, world_size: int) -> None:
    run_threads(world_size, CASES[case])
