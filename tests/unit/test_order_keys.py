"""Floats as integers of the same order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disttrain.dtensor.redistribute.order_keys import from_order_keys, order_keys


@given(st.lists(st.floats(width=16), min_size=1), st.booleans())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_extrema_of_keys_are_those_of_values(dtype: torch.dtype, numbers: list[float], is_max: bool) -> None:
    values = torch.tensor(numbers, dtype=dtype)
    keys = order_keys(values, nan_is_highest=is_max)
    found = from_order_keys(keys.amax(0) if is_max else keys.amin(0), dtype)
    assert torch.equal(found.nan_to_num(1e9), (values.amax(0) if is_max else values.amin(0)).nan_to_num(1e9))
    back = from_order_keys(keys, dtype)
    assert back.dtype == dtype
    torch.testing.assert_close(back, values, rtol=0, atol=0, equal_nan=True)
