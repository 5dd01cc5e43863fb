"""The fuzzer's targets over a few bytes of each kind, so that they go on fitting the code."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.store_fuzz import TARGETS, seeds


@pytest.mark.parametrize("name", list(TARGETS))
def test_no_bytes_break_it(name: str) -> None:
    target = TARGETS[name]
    for seed in seeds():
        target(seed)

    @settings(max_examples=100)
    @given(st.binary(max_size=400))
    def run(data: bytes) -> None:
        target(data)

    run()
