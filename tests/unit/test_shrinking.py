"""Failing values are made small, by few trials."""

from __future__ import annotations

from tests.fuzz.shrinking import shrink, without_some


def test_what_matters_is_left() -> None:
    tried: list[tuple[int, ...]] = []

    def fails(items: tuple[int, ...]) -> bool:
        tried.append(items)
        return 3 in items and 40 in items

    assert shrink(tuple(range(64)), fails, without_some) == (3, 40)
    assert len(tried) == len(set(tried)) < 64


def test_each_run_and_each_item_is_left_out() -> None:
    assert list(without_some("abcd")) == [
        ("a", "b"),
        ("c", "d"),
        ("a", "b", "c"),
        ("a", "b", "d"),
        ("a", "c", "d"),
        ("b", "c", "d"),
    ]
    assert list(without_some("a")) == [()]
    assert list(without_some("")) == []


def test_it_ends_when_time_is_over() -> None:
    assert shrink((1, 2, 3), lambda _: True, without_some, limit_s=-1.0) == (1, 2, 3)
