"""`python -m disttrain.kernels bench`: a row for each case and step, and the same numbers in a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from disttrain.kernels.__main__ import main


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
        assert all(seconds > 0 for one in report["results"] for seconds in one["seconds"].values())
