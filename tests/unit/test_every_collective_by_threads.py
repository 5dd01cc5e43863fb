"""Ranks as threads do what ranks over Gloo do."""

from __future__ import annotations

import pytest

from disttrain.testing import run_threads
from tests.cases.collectives import CASES
from tests.cases.objects import CASES as OBJECT_CASES


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("case", list(CASES))
def test_by_threads(case: str, world_size: int) -> None:
    run_threads(world_size, CASES[case])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", list(OBJECT_CASES))
def test_objects_by_threads(case: str, world_size: int) -> None:
    run_threads(world_size, OBJECT_CASES[case])
