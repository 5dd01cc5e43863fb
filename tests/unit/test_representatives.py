"""What `make test` runs of tests with many cases, and what it tells of its budget."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.budget import Process, read_stat, seconds_of_tree, told
from tests.representatives import MAX_CASES, each_choice, spread

REPOSITORY = Path(__file__).parents[2]
PRODUCTS = st.lists(st.integers(1, 5), max_size=4).map(
    lambda sizes: [tuple(map(str, case)) for case in product(*map(range, sizes))]
)


@given(PRODUCTS)
def test_each_value_of_each_parameter_is_there(cases: list[tuple[str, ...]]) -> None:
    chosen = each_choice(cases)
    assert chosen == sorted(set(chosen))
    assert {value for index in chosen for value in enumerate(cases[index])} == {v for c in cases for v in enumerate(c)}
    # As many as the longest parameter has values: no fewer will do.
    assert len(chosen) == max((len({case[place] for case in cases}) for place in range(len(cases[0]))), default=1)


def test_values_meet_different_others() -> None:
    cases = list(product("abcd", "xy"))
    assert [cases[index] for index in each_choice(cases)] == [("a", "x"), ("b", "y"), ("c", "x"), ("d", "y")]


def test_a_value_that_some_cases_lack_is_there() -> None:
    assert each_choice([("a", "x"), ("b", "x"), ("b", "y"), ("c", "y")]) == [0, 2, 3]


@pytest.mark.parametrize(
    ("number", "expected"), [(0, []), (1, [3]), (2, [3, 11]), (3, [3, 7, 11]), (5, [3, 5, 7, 9, 11]), (9, None)]
)
def test_a_few_are_spread(number: int, expected: list[int] | None) -> None:
    cases = [3, 5, 7, 9, 11]
    assert spread(cases, number) == (cases if expected is None else expected)


TESTS = """
import pytest

@pytest.mark.parametrize("one", "abc")
@pytest.mark.parametrize("other", "xyz")
def test_product(one, other): pass

@pytest.mark.parametrize("one", "abcdefghi")
def test_list(one): pass

@pytest.mark.sweep(1)
@pytest.mark.parametrize("one", "abc")
def test_marked(one): pass

@pytest.mark.sweep(0)
def test_none(): pass
"""


@pytest.mark.parametrize(("option", "number"), [((), 9 + 9 + 3 + 1), (("--representatives",), 3 + MAX_CASES + 1)])
def test_pytest_runs_them(tmp_path: Path, option: tuple[str, ...], number: int) -> None:
    (tmp_path / "test_cases.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.representatives", "-p", "no:cacheprovider"]
    command += ["-c", "/dev/null", "--rootdir", str(tmp_path), *option, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=REPOSITORY)
    assert f"{number} passed" in run.stdout, run.stdout + run.stderr


def test_nothing_is_left_out_before_a_change_lands() -> None:
    recipes = dict(re.findall(r"^([a-z-]+):.*\n((?:\t.*\n)+)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert 'make PYTHON="$python" test-all\n' in (REPOSITORY / ".ci" / "run").read_text()
    assert recipes["test-all"] == recipes["test"].replace(" --representatives", "") != recipes["test"]


def test_seconds_are_those_of_all_descendants() -> None:
    known = {1: Process(0, 100.0), 5: Process(1, 1.0), 6: Process(5, 2.0), 7: Process(6, 4.0), 8: Process(1, 50.0)}
    assert seconds_of_tree(5, known) == 7.0


def test_a_program_may_have_any_name() -> None:
    fields = "S 17 " + " ".join(["0"] * 9) + " 100 20 300 4 20 0 1 0 99"
    assert read_stat(f"23 (a ) b (c) {fields}").parent == 17
    assert read_stat(f"23 (a ) b (c) {fields}").seconds == pytest.approx(4.24)


def test_the_dearest_are_named_when_it_is_passed() -> None:
    wall_s = {f"test_{number}": float(number) for number in range(20)}
    assert told(900.0, 1100.0, wall_s) == ["processors: 900 s of the 1,100 s that `make test` may take"]
    total, *dearest = told(1200.4, 1100.0, wall_s)
    assert total.startswith("processors: 1,200 s of the 1,100 s that `make test` may take: too much.")
    assert [line.split()[-1] for line in dearest] == [f"test_{number}" for number in range(19, 9, -1)]
