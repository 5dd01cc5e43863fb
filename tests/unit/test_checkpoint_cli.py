"""`python -m disttrain.checkpoint`: what it prints, what it removes, and its exit codes."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain.checkpoint import Checkpointer, PerRank, save
from disttrain.checkpoint.cli import main
from disttrain.console import size_text

DEAD = "step-00000009.tmp-" + "0" * 32


def state(value: float = 1.0) -> dict[str, Any]:
    tied = torch.full((4, 2), value, dtype=torch.bfloat16)
    return {
        "model": {"w": tied, "head": tied, "b": torch.tensor(value)},
        "step": 3,
        "seeds": PerRank([1]),
    }


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    checkpointer = Checkpointer(tmp_path / "runs", keep=None)
    for step in (1, 2, 3):
        checkpointer.save(step, state(float(step)))
    return tmp_path / "runs"


def test_a_save_is_listed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(runs / "step-00000001")]) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith(
        f"{runs}/step-00000001: 2 tensors, 1 second name, 1 value; 23 bytes in 1 file; saved by 1 rank (disttrain "
    )
    assert [line.split() for line in lines] == [
        ["name", "shape", "dtype", "size", "chunks"],
        ["model/b", "-", "float32", "4", "bytes", "1"],
        ["model/head", "is", "model/w"],
        ["model/w", "4x2", "bfloat16", "16", "bytes", "1"],
        ["seeds", "value", "per", "rank", "2", "bytes", "1"],
        ["step", "value", "1", "bytes", "1"],
    ]
    assert main(["ls", "--json", str(runs / "step-00000001")]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"]["model/w"] == {
        "shape": [4, 2],
        "dtype": "bfloat16",
        "num_bytes": 16,
        "num_chunks": 1,
    }


def test_the_saves_of_a_folder_are_listed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / DEAD).mkdir()
    (runs / "step-00000002" / "manifest.json").write_text("{}")
    assert main(["ls", str(runs)]) == 0
    head, _, _, *lines = capsys.readouterr().out.splitlines()
    assert head == f"{runs}: 3 saves"
    assert [line.split()[:3] for line in lines[:2]] == [
        ["step-00000001", "2", "23"],
        ["step-00000002", f"{runs}/step-00000002/manifest.json", "does"],
    ]
    assert lines[3].split() == [DEAD, "unfinished:", "under", "way,", "or", "dead"]


def test_where_there_is_no_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["ls", str(tmp_path)], ["verify", str(tmp_path)], ["diff", str(tmp_path), str(tmp_path / "x")]):
        assert main(command) == 2
    assert "no save" in capsys.readouterr().err


def test_whole_saves_are_found_whole(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(runs), "--threads", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(";")[0] for line in lines] == [f"{runs}/step-0000000{step}: whole" for step in (1, 2, 3)]
    assert lines[0].endswith(" GB/s")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-1] + b"?", "does not have the bytes of 'step' that were saved, in the 1048576 bytes"),
        (lambda data: b"?" + data[1:], "does not have the bytes of 'the header' that were saved"),
        (lambda data: data[:-1], "has 4118 bytes, 4119 were saved."),
    ],
)
def test_damage_is_found(runs: Path, capsys: pytest.CaptureFixture[str], damage: Any, said: str) -> None:
    file = runs / "step-00000002" / "rank-00000.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert main(["verify", str(runs)]) == 1
    out = capsys.readouterr().out
    assert said in out
    assert f"{runs}/step-00000002: damaged;" in out
    assert f"{runs}/step-00000003: whole;" in out


def test_a_missing_file_is_damage(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "step-00000002" / "rank-00000.safetensors").unlink()
    assert main(["verify", str(runs / "step-00000002")]) == 1
    assert "rank-00000.safetensors is missing." in capsys.readouterr().out


def test_differences_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nan = float("nan")
    save({"a": torch.tensor([1.0, 2, nan]), "b": torch.ones(2), "c": torch.ones(2), "s": 1}, tmp_path / "first")
    save(
        {"a": torch.tensor([1.0, 2.5, nan]), "b": torch.ones(3), "c": torch.ones(2).half(), "d": 1, "s": 2},
        tmp_path / "second",
    )
    paths = [str(tmp_path / "first"), str(tmp_path / "second")]
    assert main(["diff", *paths]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "d: a value of the second alone",
        "b: float32[2] and float32[3]",
        "c: float32[2] and float16[2]",
    ]
    assert main(["diff", "--values", *paths]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "d: a value of the second alone",
        "a: 1 of 3 values differ, by 0.5 at most",
        "b: float32[2] and float32[3]",
        "c: float32[2] and float16[2]",
        "s: values differ",
    ]
    assert main(["diff", "--values", paths[0], paths[0]]) == 0
    assert capsys.readouterr().out == "the same\n"


def test_leftovers_are_removed_unless_somebody_holds_them(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = DEAD.replace("9", "8")
    for name in (DEAD, held):
        (runs / name).mkdir()
    with (runs / (held + ".lock")).open("x") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["gc", str(runs)]) == 0
        assert capsys.readouterr().out.splitlines() == [
            f"removed {runs / DEAD}",
            f"left {runs / held}: a living process holds it, or nobody can know",
        ]
        assert main(["gc", str(runs), "--unfinished", "--keep", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"removed {runs / held}", f"removed {runs / 'step-00000001'}"]
    assert sorted(path.name for path in runs.iterdir()) == ["step-00000002", "step-00000003", held + ".lock"]


def test_sizes_are_readable() -> None:
    assert [size_text(count) for count in (0, 1023, 1536, 5 << 30, 3 << 50)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "5 GiB",
        "3072 TiB",
    ]
