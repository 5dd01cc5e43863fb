"""Pickles as data: what Python writes is parsed, what is spelled out Python reads, and nothing is run."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain._python.pickles import Made, Map, Name, parse
from disttrain.checkpoint.interop.pickle_writing import dumps

plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=12,
)


@settings(max_examples=50)
@given(plain_values)
def test_what_is_spelled_out_is_what_pickle_reads(value: Any) -> None:
    assert pickle.loads(dumps(value)) == value  # noqa: S301  what was just written


@settings(max_examples=50)
@given(plain_values.filter(lambda value: value is not None), st.integers(2, 5))
def test_what_pickle_writes_is_parsed(value: Any, protocol: int) -> None:
    assert parse(dumps(_as_data(value))) == parse(pickle.dumps(_as_data(value), protocol))


def _as_data(value: Any) -> Any:
    """Without bytes, which protocols write differently."""
    if isinstance(value, bytes):
        return list(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_as_data, value))
    return {key: _as_data(item) for key, item in value.items()} if isinstance(value, dict) else value


def test_calls_and_names_stay_what_they_are() -> None:
    made = parse(pickle.dumps(OrderedDict(a=1), 2))
    assert made == Made(Name("collections", "OrderedDict"), (), items=Map([("a", 1)]))
    assert str(made.what) == "collections.OrderedDict"


@pytest.mark.parametrize("data", [b"", b".", b"\x80\x02", b"\x80\x02a.", b"\x80\x02u.", b"K\x01K\x02b."])
def test_what_is_no_pickle_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="is damaged"):
        parse(data)
