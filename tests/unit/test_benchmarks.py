"""The benchmarks' own tools: spreads, rows, tables, results files, the page."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield {name: importlib.import_module(name) for name in ("harness", "page")}
    sys.path.remove(str(ROOT / "benchmarks"))


def test_a_spread_is_of_quartiles_and_of_few_values_their_range(tools: dict[str, ModuleType]) -> None:
    harness = tools["harness"]
    assert harness.spread([5, 1, 2, 3, 4], scale=10) == harness.Spread(30, 15, 45)
    assert harness.spread([3, 1]) == harness.Spread(2, 1, 3)
    assert harness.spread([7]) == harness.Spread(7, 7, 7)


def test_who_is_behind(tools: dict[str, ModuleType]) -> None:
    harness = tools["harness"]
    times = {"ours": [1.2], "torch": [1.0]}
    assert harness.row("step", "ms", times).is_behind
    assert not harness.Row("step", "tokens/s", harness.row("", "", times).sides, more_is_better=True).is_behind
    assert not harness.row("step", "ms", {"ours": [1.04], "torch": [1.0]}).is_behind
    alone = harness.row("step", "ms", {"ours": [1.0]})
    assert alone.ratio is None
    assert not alone.is_behind


def test_sides_take_turns_and_warm_up(tools: dict[str, ModuleType]) -> None:
    called: list[str] = []

    def calling(side: str) -> float:
        called.append(side)
        return float(len(called))

    taken = tools["harness"].in_turns({"ours": lambda: calling("ours"), "torch": lambda: calling("torch")}, 2, 1)
    assert called == ["ours", "torch"] * 3
    assert taken == {"ours": [3.0, 5.0], "torch": [4.0, 6.0]}


def test_a_table_has_a_head_wherever_the_sides_change(tools: dict[str, ModuleType]) -> None:
    harness = tools["harness"]
    rows = [
        harness.row("all_reduce", "us", {"torch": [4.0], "ours": [1.0]}),
        harness.row("page", "s", {"ours": [0.5, 1.5]}),
    ]
    assert harness.table(rows).splitlines() == [
        "            unit  ours  torch  ours / torch",
        "all_reduce  us    1.00  4.00   0.25",
        "",
        "      unit  ours",
        "page  s     1.00 [0.50, 1.50]",
    ]


def test_results_are_read_as_they_were_written(
    tools: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harness = tools["harness"]
    rows = [harness.row("step", "ms", {"ours": [1.5], "torch": [3.0]})]
    harness.finish(rows, tmp_path / "case.json", sizes={"dim": 4})
    about, read = harness.read(tmp_path / "case.json")
    assert read == rows
    assert set(about) == {"command", "commit", "versions", "machine"}
    assert "0.50" in capsys.readouterr().out
    assert "| step | ms | 1.50 | 3.00 | 0.50 |" in tools["page"].as_page(tmp_path)


def test_the_page_is_that_of_the_results(tools: dict[str, ModuleType]) -> None:
    page = tools["page"]
    assert page.PAGE.read_text(encoding="utf-8") == page.as_page(page.RESULTS), "run: python benchmarks --page"


def test_all_are_run() -> None:
    """Whatever needs no GPU is in the list, and everything there exists."""
    text = (ROOT / "benchmarks" / "__main__.py").read_text(encoding="utf-8")
    tools = {"__main__", "harness", "page", "without_peers"}
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - tools
    for name in scripts:
        assert (f'"{name}": [' in text) == (not name.endswith("_gpu")), name
