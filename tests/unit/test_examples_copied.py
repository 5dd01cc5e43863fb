"""`python -m disttrain.examples`: what it lists, copies, and leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from disttrain.errors import SettingError
from disttrain.examples import copy_to, descriptions
from disttrain.examples.__main__ import main

ROOT = Path(__file__).parents[2]


def _files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert descriptions().keys() == scripts
    assert [line.split()[0] for line in out.splitlines()[1 : len(scripts) + 1]] == sorted(scripts)
    assert "python -m disttrain.examples examples" in out
    assert all(descriptions().values())


def test_all_are_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "examples"
    assert main([str(target)]) == 0
    assert _files(target) == _files(ROOT / "examples")
    out = capsys.readouterr().out
    assert f"{len(_files(target))} new files in {target}" in out
    assert f"disttrain-launch --standalone --nproc-per-node 2 {target}/train_llama.py" in out


def test_what_the_reader_has_changed_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy_to(tmp_path)
    (tmp_path / "tp.py").write_text("mine")
    (tmp_path / "mine.py").write_text("mine")
    (tmp_path / "mesh.py").unlink()
    assert main([str(tmp_path)]) == 2
    problem = f"examples: {tmp_path} has other files of these names: tp.py. Nothing was copied."
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "mesh.py").exists()
    assert (tmp_path / "tp.py").read_text() == "mine"
    assert main([str(tmp_path), "--overwrite"]) == 0
    assert _files(tmp_path) == {**_files(ROOT / "examples"), "mine.py": b"mine"}


def test_a_second_time_nothing_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy_to(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert main([str(tmp_path)]) == 0
    assert f"{tmp_path} has them all already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == times


def test_what_is_no_folder_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main([str(tmp_path / "file")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("examples: ")
    assert error.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        main(["--overwrite"])


def test_many_changed_files_are_not_all_named(tmp_path: Path) -> None:
    copy_to(tmp_path)
    for path in tmp_path.glob("*.py"):
        path.write_text("mine")
    with pytest.raises(SettingError, match=r"of these names: (\w+\.py, ){4}\w+\.py and others\. Nothing was copied"):
        copy_to(tmp_path)
