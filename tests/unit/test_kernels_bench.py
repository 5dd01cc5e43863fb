"""`python -m disttrain.kernels bench`: a row for each case and step, and the same numbers in a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from disttrain.kernels.__main__ import main
from disttrain.kernels.attention import bench as attention_bench
from disttrain.kernels.attention.bench import Sizes, timed


def test_rows_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def uncompiled(function: Callable[..., object]) -> Callable[..., object]:
        return function

    monkeypatch.setattr(torch, "compile", uncompiled)  # which takes seconds
    monkeypatch.setattr("disttrain.kernels.bench.NUM_ROUNDS", 2)
    monkeypatch.setattr("disttrain.kernels.bench._COPY_BYTES", 1 << 20)
    out = tmp_path / "kernels.json"
    sizes = ["--tokens", "16", "--dim", "128", "--vocab", "32", "--out", str(out)]
    for only, rows in (("swiglu", 2), ("linear", 1), ("AdamW", 2)):
        assert main(["bench", *sizes, "--only", only]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].endswith("GB/s")
        assert [line.split()[0].startswith(only) for line in lines[2:]] == [True] * rows
        report = json.loads(out.read_text())
        assert [one["name"].split()[0].startswith(only) for one in report["results"]] == [True] * rows
        has_floor = only != "linear"
        assert all(("copy" in one["seconds"]) == has_floor for one in report["results"])
        assert lines[2].count("%") == has_floor
        assert all(seconds > 0 for one in report["results"] for seconds in one["seconds"].values())


def test_attention_s_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock of our own: names of what serves, and the products of what is seen."""
    monkeypatch.setattr(attention_bench, "measure", lambda names, *_: dict.fromkeys(names, 1.0))
    sizes = Sizes(2, 4, 2, 16, [10, 20], window=3, document=5)
    found = {(one.name, one.is_whole_step): one for one in timed(sizes, torch.device("cpu"))}
    assert len(found) == 2 * 2 * 6
    assert found["causal 10", False].flops == 4 * 2 * 4 * 16 * 55
    assert found["window 3 20", True].flops == 4 * 2 * 4 * 16 * (20 * 3 - 3) * 7 // 2
    assert list(found["causal 10", False].seconds) == ["sdpa"]
    assert list(found["alibi 10", True].seconds) == ["dense"]
    assert {name for name, _ in found} >= {"documents 5 10", "prefix 20", "soft cap 10"}
    assert len(list(timed(sizes, torch.device("cpu"), ["prefix", "alibi"]))) == 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_attention_is_not_measured_on_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attention"]) == 1
    assert capsys.readouterr().out.startswith("There is no GPU")
