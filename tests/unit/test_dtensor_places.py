"""Places along a dim are those of Python's ranges."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disttrain.dtensor.spec.places import Places

ENDS = st.none() | st.integers(-12, 12)
SIZES = st.integers(0, 9)


def as_range(places: Places) -> range:
    return range(places.start, places.start + places.length * places.step, places.step)


@given(SIZES, ENDS, ENDS, st.integers(1, 4))
def test_slices_are_pythons(size: int, start: int | None, end: int | None, step: int) -> None:
    places, expected = Places.of_slice(size, start, end, step), range(size)[start:end:step]
    assert list(as_range(places)) == list(expected)
    if expected:
        assert places.end == expected[-1] + 1


@given(SIZES, ENDS, ENDS, st.integers(1, 4), st.integers(0, 9), st.integers(0, 9), st.integers(-3, 12))
def test_parts_of_them(
    size: int, start: int | None, end: int | None, step: int, first: int, length: int, bound: int
) -> None:
    places = Places.of_slice(size, start, end, step)
    expected = list(as_range(places))
    assert places.num_below(bound) == sum(place < bound for place in expected)
    first = min(first, places.length)
    last = min(first + length, places.length)
    assert list(as_range(places.between(first, last))) == expected[first:last]
    assert list(as_range(places.less(2))) == [place - 2 for place in expected]
