"""Representatives of the tests with many cases: `pytest --representatives`, by which `make test` takes ten minutes.

A test that is parametrized more than once runs for a product. Its representatives are as few of the cases as have each
value of each parameter once or more (each-choice coverage: Ammann and Offutt, Introduction to Software Testing). Of
these, and of the values of a test that is parametrized once, at most `MAX_CASES` run. This holds for whatever is added.

A test that costs seconds for a case says how many of its cases are enough, by a mark:

    @pytest.mark.sweep(2)    two of its cases, the first and the last
    @pytest.mark.sweep(0)    none: a cheaper test judges the same, for fewer values or in a smaller world

Without the option all tests run: `make test-all`, which `.ci/run` calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest

OPTION = "--representatives"

MAX_CASES = 3
"""Of a test without a mark."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, action="store_true", help="of tests with many cases, run a few that have each value")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sweep(cases): with --representatives, so many of the test's cases are enough")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption(OPTION):
        return
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    kept = {item for cases in tests.values() for item in representatives_of(cases)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def representatives_of(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those of the cases of one test."""
    chosen = each_choice([_values(case) for case in cases])
    mark = cases[0].get_closest_marker("sweep")
    return [cases[index] for index in spread(chosen, *(mark.args if mark is not None else [MAX_CASES]))]


def _values(case: pytest.Item) -> tuple[str, ...]:
    """Its names of the values of each of the test's `parametrize`."""
    parameters = getattr(case, "callspec", None)
    return tuple(parameters._idlist) if parameters is not None else ()


def each_choice(cases: Sequence[tuple[str, ...]]) -> list[int]:
    """The indices of a few cases that have each value of each parameter, in their order.

    Each time the case with the most values that are still missing is taken; of several, the one whose values have been
    taken least, so that no value goes with the same others every time.
    """
    missing = {value for case in cases for value in enumerate(case)}
    uses: Counter[tuple[int, str]] = Counter()
    chosen: list[int] = [] if missing else list(range(len(cases)))
    while missing:
        best = max(
            range(len(cases)),
            key=lambda index: (
                sum(value in missing for value in enumerate(cases[index])),
                -sum(uses[value] for value in enumerate(cases[index])),
            ),
        )
        chosen.append(best)
        missing.difference_update(enumerate(cases[best]))
        uses.update(enumerate(cases[best]))
    return sorted(chosen)


def spread(chosen: Sequence[int], number: int) -> list[int]:
    """At most so many, as far from each other as they can be: the first one, the last one, and those between."""
    if number >= len(chosen):
        return list(chosen)
    if number < 2:
        return list(chosen[:number])
    return [chosen[step * (len(chosen) - 1) // (number - 1)] for step in range(number)]
