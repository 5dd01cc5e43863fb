"""Index ranges along a dim are those of Python's ranges."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disttrain.dtensor.spec.index_range import IndexRange

ENDS = st.none() | st.integers(-12, 12)
SIZES = st.integers(0, 9)


def as_range(indices: IndexRange) -> range:
    return range(indices.start, indices.start + indices.length * indices.step, indices.step)


@given(SIZES, ENDS, ENDS, st.integers(1, 4))
def test_slices_are_pythons(size: int, start: int | None, end: int | None, step: int) -> None:
    indices, expected = IndexRange.of_slice(size, start, end, step), range(size)[start:end:step]
    assert list(as_range(indices)) == list(expected)
    if expected:
        assert indices.end == expected[-1] + 1


@given(SIZES, ENDS, ENDS, st.integers(1, 4), st.integers(0, 9), st.integers(0, 9), st.integers(-3, 12))
def test_parts_of_them(
    size: int, start: int | None, end: int | None, step: int, first: int, length: int, bound: int
) -> None:
    indices = IndexRange.of_slice(size, start, end, step)
    expected = list(as_range(indices))
    assert indices.num_below(bound) == sum(index < bound for index in expected)
    first = min(first, indices.length)
    last = min(first + length, indices.length)
    assert list(as_range(indices.between(first, last))) == expected[first:last]
    assert list(as_range(indices.less(2))) == [index - 2 for index in expected]
