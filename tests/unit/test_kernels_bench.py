"""The benchmarks of kernels: a row for each case and step, and the same numbers in a file."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    names = ("kernels_gpu", "attention_gpu", "kernels.attention", "kernels.timing")
    yield {name: importlib.import_module(name) for name in names}
    sys.path.remove(str(ROOT / "benchmarks"))


def test_rows_and_file(
    scripts: dict[str, ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def uncompiled(function: Callable[..., object]) -> Callable[..., object]:
        return function

    monkeypatch.setattr(torch, "compile", uncompiled)  # which takes seconds
    monkeypatch.setattr(scripts["kernels.timing"], "NUM_ROUNDS", 2)
    monkeypatch.setattr(scripts["kernels.timing"], "_COPY_BYTES", 1 << 20)
    out = tmp_path / "kernels.json"
    sizes = ["--tokens", "16", "--dim", "128", "--vocab", "32", "--out", str(out)]
    for only, rows in (("swiglu", 2), ("linear", 1), ("AdamW", 2)):
        assert scripts["kernels_gpu"].main([*sizes, "--only", only]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].endswith("GB/s")
        assert [line.split()[0].startswith(only) for line in lines[2:]] == [True] * rows
        results = json.loads(out.read_text())["details"]["results"]
        assert [result["name"].split()[0].startswith(only) for result in results] == [True] * rows
        has_floor = only != "linear"
        assert all(("copy" in result["seconds"]) == has_floor for result in results)
        assert lines[2].count("%") == has_floor
        assert all(seconds > 0 for result in results for seconds in result["seconds"].values())


def test_attention_s_cases(scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock of our own: names of what serves, and the products of what is seen."""
    attention = scripts["kernels.attention"]
    monkeypatch.setattr(attention, "measure", lambda names, *_: dict.fromkeys(names, 1.0))
    sizes = attention.Sizes(2, 4, 2, 16, [10, 20], window=3, document=5)
    timings = {(case.name, case.is_whole_step): case for case in attention.timed(sizes, torch.device("cpu"))}
    assert len(timings) == 2 * 2 * 6
    assert timings["causal 10", False].flops == 4 * 2 * 4 * 16 * 55
    assert timings["window 3 20", True].flops == 4 * 2 * 4 * 16 * (20 * 3 - 3) * 7 // 2
    assert list(timings["causal 10", False].seconds) == ["sdpa"]
    assert list(timings["alibi 10", True].seconds) == ["dense"]
    assert {name for name, _ in timings} >= {"documents 5 10", "prefix 20", "soft cap 10"}
    assert len(list(attention.timed(sizes, torch.device("cpu"), ["prefix", "alibi"]))) == 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_attention_is_not_measured_on_cpus(scripts: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    assert scripts["attention_gpu"].main([]) == 1
    assert capsys.readouterr().out.startswith("There is no GPU")
