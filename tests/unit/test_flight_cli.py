"""`disttrain-flight`: what it prints, and the code it exits with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disttrain.flight_recorder.analysis.verdict import Kind
from disttrain.flight_recorder.cli import main
from disttrain.flight_recorder.dumps.dump import dump_name, write_dump
from tests.unit.flight_ranks import Rank


@pytest.fixture
def hang(tmp_path: Path) -> Path:
    """Rank 1 is in Python, the others wait for it."""
    for rank in range(3):
        calls = Rank(rank).call("all_reduce")
        dump = calls.dump(at=33) if rank == 1 else calls.waits("all_reduce", 11).dump()
        write_dump(tmp_path / dump_name(dump), dump)
    return tmp_path


def test_text(hang: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(hang)]) == Kind.RANK_ABSENT.exit_code == 10
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1. rank absent: rank 1 (in python)"
    assert any("/job/train.py:33 in load" in line for line in lines)
    assert any(line.startswith("   next: ") for line in lines)
    assert "3 of 3 ranks dumped, on 1 host, job job" in "\n".join(lines)


def test_json(hang: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(hang), "--json"]) == 10
    answer = json.loads(capsys.readouterr().out)
    (verdict,) = answer["verdicts"]
    assert (verdict["kind"], verdict["ranks"]) == ("rank_absent", [1])
    assert set(verdict) == {"kind", "ranks", "summary", "evidence", "cause", "advice"}
    assert [dump["rank"] for dump in answer["dumps"]] == [0, 1, 2]
    assert answer["notes"] == []


def test_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == Kind.NOT_ENOUGH_DATA.exit_code == 3
    assert capsys.readouterr().out.startswith("1. not enough data\n   There is no dump that can be used.")


def test_one_dump(hang: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(hang / "rank-00001.job.flight")]) == 3
    assert "Ranks 0, 2 of 3 have no dump" in capsys.readouterr().out


def test_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "absent")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"disttrain-flight: '{tmp_path}/absent' cannot be opened: No such file or directory. "
        "Name the folder with the dumps.\n"
    )


def test_a_name_that_no_file_can_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["a\0b"]) == 2
    assert "cannot be opened" in capsys.readouterr().err


def test_every_kind_has_a_code_of_its_own() -> None:
    codes = [kind.exit_code for kind in Kind]
    assert len(set(codes)) == len(codes)
    assert Kind.NOTHING_WRONG.exit_code == 0
    assert not {1, 2} & set(codes)
