"""Ranks by a rule, beside lists of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain.ranks import Positions, Ranks, cut_loops

loops = st.lists(st.tuples(st.integers(1, 4), st.integers(-9, 40)), max_size=3)
lists = st.lists(st.integers(0, 30), max_size=12)


def expanded(first: int, loops: list[tuple[int, int]]) -> list[int]:
    steps = itertools.product(*[[step * stride for step in range(size)] for size, stride in loops])
    return [first + sum(each) for each in steps]


def check_like(ranks: Ranks, listed: list[int]) -> None:
    """All that can be asked of ranks is as of the list."""
    assert list(ranks) == listed == list(ranks.listed) == [ranks[place] for place in range(len(ranks))]
    assert len(ranks) == len(listed)
    assert ranks == Ranks.of(listed)
    assert hash(ranks) == hash(Ranks.of(listed))
    assert ranks.repeats == (len(set(listed)) < len(listed))
    assert ranks == Ranks.from_plain(ranks.plain())
    if ranks.ascends:
        assert listed == sorted(set(listed))
    for bounds in (slice(None, None, 2), slice(1, -1), slice(None, None, -1), slice(2, 2)):
        assert list(ranks[bounds]) == listed[bounds]
    if listed:
        assert (ranks.lowest, ranks.highest, ranks[-1]) == (min(listed), max(listed), listed[-1])
    if not ranks.repeats:
        asked = range(min(listed, default=0) - 2, max(listed, default=0) + 3)
        known = {rank: place for place, rank in enumerate(listed)}
        assert [ranks.position(rank) for rank in asked] == [known.get(rank) for rank in asked]
        assert [rank in ranks for rank in asked] == [rank in known for rank in asked]
        assert dict(Positions(ranks)) == known


@given(st.integers(0, 20), loops)
def test_nested_loops_are_like_their_list(first: int, loops: list[tuple[int, int]]) -> None:
    check_like(Ranks.grid(first, loops), expanded(first, loops))


@given(lists)
def test_any_list_is_like_itself(listed: list[int]) -> None:
    check_like(Ranks.of(listed), listed)


@given(loops, loops)
def test_ranks_at_positions_of_others(places: list[tuple[int, int]], order: list[tuple[int, int]]) -> None:
    ordered = expanded(3, order)
    if len(set(ordered)) == len(ordered):
        indices = [place % len(ordered) for place in expanded(0, places)]
        members = Ranks.of(ordered).at(Ranks.of(indices))
        assert list(members) == [ordered[index] for index in indices]
        positions = Ranks.of(ordered).positions(members)
        assert positions is not None
        assert list(positions) == indices
        assert Ranks.of(ordered).positions(Ranks.of([*members, max(ordered) + 1])) is None


def test_a_rule_is_found_whoever_made_them() -> None:
    rows = Ranks.of([0, 1, 8, 9, 16, 17])
    assert rows.loops == ((3, 8), (2, 1))
    assert rows == Ranks.grid(0, [(3, 8), (2, 1)])
    assert Ranks.of(range(100)) == Ranks.of(list(range(100))) == Ranks.grid(0, [(10, 10), (1, 7), (10, 1)])
    assert Ranks.of([5]) == Ranks.of(range(5, 6))
    assert Ranks.of([0, 1, 3]).loops is None
    assert Ranks.of([0, 2, 4, 3, 5, 7]).loops is None, "loops that reach into each other are no rule"
    with pytest.raises(TypeError):
        Ranks.of([0.5])  # type: ignore[list-item]


def test_shown_in_short() -> None:
    texts = [Ranks.of(listed).text for listed in ([0, 1], list(range(8)), [0, 2, 4, 6], list(range(0, 1024, 8)), [3])]
    assert texts == ["0,1", "0-7", "0,2,4,6", "0,8,16,24,…,1016 (128 ranks)", "3"]


def test_a_grid_is_cut_into_axes() -> None:
    assert cut_loops([(12, 1)], (3, 4)) == [[(3, 4)], [(4, 1)]]
    assert cut_loops([(3, 10), (4, 1)], (12,)) == [[(3, 10), (4, 1)]]
    assert cut_loops([(3, 10), (4, 1)], (1, 3, 2, 2)) == [[], [(3, 10)], [(2, 2)], [(2, 1)]]
    assert cut_loops([(6, 10), (4, 1)], (4, 6)) is None
