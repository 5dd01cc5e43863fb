"""The benchmarks' own tools: spreads, rows, tables, results files, the page."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield {name: importlib.import_module(name) for name in ("harness", "page", "forms")}
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


def test_the_command_that_is_kept_does_not_say_where_results_went(
    tools: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*words: str) -> object:
        monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/step.py", *words])
        return tools["harness"].asked()

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert asked("--rounds", "3", "--json", "/elsewhere/step.json", "--quick") == (
        "python benchmarks/step.py --rounds 3 --quick"
    )
    assert asked("--out=/elsewhere/step.json", "--ways", "torch compiled") == (
        "python benchmarks/step.py --ways 'torch compiled'"
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert asked("--json", "x") == "disttrain-launch --standalone --nproc-per-node 2 benchmarks/step.py"


def test_the_page_is_that_of_the_results(tools: dict[str, ModuleType]) -> None:
    page = tools["page"]
    assert page.PAGE.read_text(encoding="utf-8") == page.as_page(page.RESULTS), "run: python benchmarks --page"


def test_all_are_run() -> None:
    """Whatever needs no GPU is in the list, and everything there exists."""
    text = (ROOT / "benchmarks" / "__main__.py").read_text(encoding="utf-8")
    tools = {"__main__", "forms", "harness", "page", "without_peers"}
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - tools
    for name in scripts:
        assert (f'"{name}": [' in text) == (not name.endswith("_gpu")), name


REPORT = {
    "command": "disttrain-launch benchmarks/x_gpu.py",
    "torch_version": "2.11.0",
    "topology": "one node, 2 x NVIDIA H200, NCCL",
    "cases": {
        "llama": {
            "arguments": {"dim": "4096"},
            "disttrain": {"step_ms": 90.0, "min_ms": 80.0, "peak_gib": 10.0},
            "disttrain, no overlap": {"step_ms": 95.0, "min_ms": 94.0, "peak_gib": 10.0},
            "torch": {"step_ms": 100.0, "min_ms": 99.0, "peak_gib": 9.0},
            "torch, loss_parallel": {"step_ms": 85.0, "min_ms": 84.0, "peak_gib": 12.0},
            "ratio": {"step_ms": 0.9, "peak_gib": 1.1},
        }
    },
}


def test_a_report_of_gpus_gives_rows(tools: dict[str, ModuleType]) -> None:
    """Torch's best way is the one that is compared, whatever stands first."""
    step, peak = tools["forms"].rows_of(REPORT)
    spread = tools["harness"].Spread
    assert (step.case, step.unit) == ("llama (torch: loss_parallel)", "ms")
    assert step.sides["ours"] == spread(90, 80, 90)
    assert step.sides["torch"] == spread(85, 84, 85)
    assert set(step.sides) == {"ours", "torch", "disttrain, no overlap"}
    assert step.is_behind
    assert (peak.case, peak.unit, peak.sides["torch"].median) == ("llama, peak", "GiB", 9)
    assert tools["forms"].rows_of({"disttrain": {"step_ms": 1.0}}) == []


def test_other_forms_of_reports(tools: dict[str, ModuleType]) -> None:
    rows_of = tools["forms"].rows_of
    rates = {side: {"median": rate, "lower": 1, "upper": 20} for side, rate in (("ours", 9), ("torch", 10))}
    (rate,) = rows_of({"all_reduce": {"unit": "GB/s", **rates, "ratio": 0.9}})
    assert (rate.case, rate.more_is_better, rate.is_behind) == ("all_reduce", True, True)
    seconds = {"eager": 3e-3, "inductor": 2e-3, "kernel": 1e-3}
    (kernel,) = rows_of({"results": [{"name": "norm", "is_whole_step": True, "seconds": seconds}]})
    assert (kernel.case, kernel.ratio) == ("norm, whole step (torch: inductor)", 0.5)


def test_a_kept_report_and_an_older_one_stand_on_the_page_alike(tools: dict[str, ModuleType], tmp_path: Path) -> None:
    (tmp_path / "old_gpu_2.json").write_text(json.dumps(REPORT))
    tools["harness"].keep(REPORT, tmp_path / "new_gpu_2.json")
    page = tools["page"].as_page(tmp_path)
    assert page.count("## On 2 x NVIDIA H200\n") == 1
    assert page.count("`disttrain-launch benchmarks/x_gpu.py`: one node, 2 x NVIDIA H200") == 1
    row = "| llama (torch: loss_parallel) | ms | 90.0 [80.0, 90.0] | 85.0 [84.0, 85.0] | 95.0 [94.0, 95.0] | **1.06** |"
    assert page.count(row) == 2
