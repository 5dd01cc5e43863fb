"""The wheel, installed by itself in a folder elsewhere: it has all files, and its programs run."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import disttrain

ROOT = Path(__file__).parents[2]
PACKAGES = {"disttrain": ROOT / "disttrain", "disttrain_launch": ROOT / "launcher" / "disttrain_launch"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


def test_it_has_all_files(wheel: Path) -> None:
    ours = {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    ours |= {
        f"disttrain/examples/scripts/{path.relative_to(ROOT / 'examples').as_posix()}"
        for path in (ROOT / "examples").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == ours
    assert {f"{name}/py.typed" for name in PACKAGES} <= packed


def test_its_programs_run_elsewhere(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    programs = target / "bin"

    def said(*command: str | Path) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout

    where = said(sys.executable, "-c", "import disttrain; print(disttrain.__version__, disttrain.__file__)")
    assert where.split() == [disttrain.__version__, str(target / "disttrain" / "__init__.py")]
    assert "--nproc-per-node" in said(programs / "disttrain-launch", "--help")
    assert "--html" in said(programs / "disttrain-flight", "--help")
    assert f"disttrain                 {disttrain.__version__}" in said(sys.executable, "-m", "disttrain", "info")
