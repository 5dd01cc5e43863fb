"""Values that travel without pickle."""

from __future__ import annotations

import datetime as dt
import uuid
from collections import Counter, OrderedDict, defaultdict
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disttrain.errors import ShapeError
from disttrain.process_group.calls.packing import pack, unpack

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(0, 99), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(plain)
def test_plain_values_come_back_equal(value: object) -> None:
    assert unpack(pack(value)) == value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int16, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    back = unpack(pack({"x": (tensor, dtype)}))["x"]
    assert torch.equal(back[0], tensor)
    assert (back[0].dtype, back[0].shape, back[1]) == (dtype, tensor.shape, dtype)


def test_views_of_complex_numbers() -> None:
    for num_elements in (1, 3):
        numbers = torch.arange(1.0, 1 + 2 * num_elements).view(-1, 2)
        numbers = torch.view_as_complex(numbers)
        for view in (numbers.imag, numbers.conj(), numbers.conj().imag):
            found = unpack(pack(view))
            assert found.tolist() == view.tolist()


def test_a_transposed_tensor_and_an_array() -> None:
    tensor = torch.arange(6).view(2, 3).T
    array = np.arange(6, dtype=np.int16).reshape(3, 2)
    back = unpack(pack([tensor, array]))
    assert torch.equal(back[0], tensor)
    assert np.array_equal(back[1], array)
    assert back[1].dtype == array.dtype


@pytest.mark.parametrize(
    "value",
    [
        {1, 2, "x", (3, None)},
        frozenset(("a", "b")),
        3 - 4j,
        OrderedDict([("b", 1), ("a", {2})]),
        Counter("abca"),
        defaultdict(list, {"x": [1]}),
        defaultdict(None, {1: 2}),
        range(1, 9, 2),
        slice(None, 3),
        dt.datetime(2020, 1, 2, 3, 4, 5, 6, dt.UTC),
        dt.date(2020, 1, 2),
        dt.timedelta(days=-1, microseconds=7),
        Path("a/b"),
        Decimal("1.10"),
        Fraction(1, 3),
        uuid.UUID(int=5),
        torch.Size([2, 3]),
        torch.device("cuda", 1),
        np.float64(1.5),
        np.float32(0.1),
        np.int64(-3),
        np.bool_(True),
        np.str_("text"),
        2**70,
        -(2**63) - 1,
    ],
    ids=repr,
)
def test_plain_classes_come_back_as_they_were(value: Any) -> None:
    (found,) = unpack(pack([value]))
    assert type(found) is type(value)
    assert found == value
    if isinstance(value, dict):
        assert list(found.items()) == list(value.items())
        assert getattr(found, "default_factory", None) is getattr(value, "default_factory", None)


def test_sets_are_alike_on_ranks_that_hash_texts_otherwise() -> None:
    texts = [f"name{number}" for number in range(99)]
    assert pack({*texts}) == pack({*texts[::-1]})


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {object()},
        np.array([object()]),
        np.zeros(2, [("x", "i4")]),
        defaultdict(object),
        np.ma.array([1, 2], mask=[0, 1]),
    ],
)
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ShapeError, match="cannot travel"):
        pack(value)
