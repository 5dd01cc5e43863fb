"""The wheel, installed by itself in a folder elsewhere: it has all files, and its programs run."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

import disttrain
from tests.pages.code import blocks
from tests.surroundings.installed import built_wheel, new_environment

ROOT = Path(__file__).parents[2]
PACKAGES = {"disttrain": ROOT / "disttrain", "disttrain_launch": ROOT / "launcher" / "disttrain_launch"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory.mktemp("wheel"))


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


@pytest.mark.sweep(0)
def test_its_programs_run_elsewhere(wheel: Path, tmp_path: Path) -> None:
    """`make wheels` follows all of docs/tutorial.md with them."""
    variables = new_environment(tmp_path / "environment", wheel)

    def said(*command: str) -> str:
        done = subprocess.run(
            ["env", *command], cwd=tmp_path, env=variables, capture_output=True, text=True, check=True, timeout=360
        )
        return done.stdout

    where, version = said("python", "-c", "import disttrain; print(disttrain.__file__, disttrain.__version__)").split()
    assert where.startswith(str(tmp_path / "environment"))
    assert version == disttrain.__version__
    assert "--nproc-per-node" in said("disttrain-launch", "--help")
    assert "--html" in said("disttrain-flight", "--help")
    assert f"disttrain                 {version}" in said("python", "-m", "disttrain", "info")
    (training,) = (block for block in blocks("docs/tutorial.md") if block.title == "train.py")
    (tmp_path / "train.py").write_text(training.text, encoding="utf-8")
    assert "step  0: loss 2.2554" in said("disttrain-launch", "train.py", "--mesh", "dp=1,tp=1", "--steps", "2")
    said("python", "-m", "disttrain.examples", "examples")
    assert {path.name for path in (tmp_path / "examples").iterdir()} >= {"train_llama.py", "llama", "README.md"}
