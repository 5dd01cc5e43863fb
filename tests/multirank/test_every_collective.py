"""Every collective over Gloo, on real ranks."""

from __future__ import annotations

import pytest

from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.collectives import CASES
from tests.cases.objects import CASES as OBJECT_CASES


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("case", list(CASES))
def test_over_gloo(case: str) -> None:
    CASES[case]()


@on_ranks(2, 3)
@pytest.mark.parametrize("case", list(OBJECT_CASES))
def test_objects_over_gloo(case: str) -> None:
    OBJECT_CASES[case]()
