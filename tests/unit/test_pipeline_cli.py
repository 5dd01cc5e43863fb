"""`python -m disttrain.pipelining`: what it prints and writes, and the code it exits with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from disttrain.pipelining import from_csv, make_schedule, to_csv, verify
from disttrain.pipelining.cli import main


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, trace, csv = tmp_path / "z.svg", tmp_path / "z.json", tmp_path / "z.csv"
    arguments = ["show", "zbv", "--ranks", "4", "--microbatches", "8"]
    assert main([*arguments, "--lowered", "--svg", str(svg), "--trace", str(trace), "--csv", str(csv)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ZBVZeroBubble · 4 ranks x 2 stages · 8 microbatches · makespan 25.5 · bubble 5.9%")
    assert lines[3].startswith("rank 0 F0 F1 F2 F3 F4 F5 F6 f0")
    assert svg.read_text(encoding="utf-8").startswith("<svg ")
    assert json.loads(trace.read_text())["traceEvents"]
    verify(from_csv(csv.read_text()))


@pytest.mark.parametrize(("name", "makespan"), [("gpipe", 12 * 9), ("interleaved", 6 * 17), ("forwardonly", 2 * 9)])
def test_times_are_the_ranks_and_shared_by_its_stages(
    name: str, makespan: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", name, "--ranks", "2", "--forward", "2", "--input", "3", "--backward", "10"]) == 0
    assert f" · makespan {makespan} · " in capsys.readouterr().out


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--ranks", "4", "--microbatches", "8", "--stages-per-rank", "4"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["schedule", "stages"]
    names = [row.split()[0] for row in rows]
    assert names[0] == "InterleavedZeroBubble"
    assert {"GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "V-Min", "DualPipeV"} <= set(names)
    makespans = [float(row.split()[3]) for row in rows]
    assert makespans == sorted(makespans)


def test_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "--ranks", "2", "--microbatches", "4", "--max-kept", "2", "--latency", "0.3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    best = lines[1].split()
    assert any(line.startswith(f"{best[0]} · 2 ranks") and f"makespan {best[3]}" in line for line in lines)


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(make_schedule("1F1B", 2, 4)))
    assert main(["check", str(path)]) == 0
    assert capsys.readouterr().out.startswith(
        "mine.csv, 2 ranks, 2 stages, 4 microbatches, computations only: right.\n"
    )
    assert main(["check", str(path), "--max-live", "1"]) == 1
    assert "The rank keeps 2 forwards for their backwards, 1 are allowed." in capsys.readouterr().out
    path.write_text("0F0,0B0\n1B0,1F0\n")
    assert main(["check", str(path)]) == 1
    assert capsys.readouterr().out == "1B0 comes before 1F0, which it uses. Exchange them. [rank 1, action 0]\n"


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["check", "absent.csv"], "absent.csv: No such file or directory."),
        (
            ["show", "dualpipev", "--ranks", "8", "--microbatches", "8"],
            "DualPipeV: num_microbatches is 8; it needs one for",
        ),
        (["show", "1f1b", "--ranks", "0"], "num_ranks is 0; there must be one at least."),
    ],
)
def test_wrong_use(arguments: list[str], answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert answer in captured.err
    assert captured.err.count("\n") == 1


def test_a_name_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["show", "1f2b"])
    assert caught.value.code == 2
    assert "There is no schedule '1f2b'. Did you mean 1F1B?" in capsys.readouterr().err


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "disttrain.pipelining", "show", "1f1b", "--ranks", "2", "--microbatches", "2"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "1F1B · 2 ranks x 1 stage · 2 microbatches · makespan 9 · bubble 33.3%" in answer.stdout
