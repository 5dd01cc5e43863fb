"""The wheel, and an environment that has it and nothing else of ours, as somebody has who installs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def built_wheel(folder: Path) -> Path:
    """A wheel of this repository. Skips the test where nothing can build one."""
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def new_environment(folder: Path, wheel: Path, base: str = sys.executable) -> dict[str, str]:
    """Variables by which a shell has a new environment's programs first.

    What the wheel needs is found where the Python `base` has it; but not disttrain, which is no package of these
    folders.
    """
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True, capture_output=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    asked = subprocess.run(
        [base, "-c", "import sys; print(*sys.path, sep='\\n')"], capture_output=True, text=True, check=True
    )
    others = [path for path in asked.stdout.splitlines() if Path(path).name in ("site-packages", "dist-packages")]
    (site / "others.pth").write_text("\n".join(others), encoding="utf-8")
    # The pip that came with `base`: an older one may not run on a newer Python.
    pip = [base, "-m", "pip", "--python", str(python), "install"]
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--ignore-installed"]
    subprocess.run([*pip, *options, str(wheel)], check=True, capture_output=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DISTTRAIN_", "OMP_", "PYTHON"))}
    path = os.pathsep.join([str(folder / "bin"), kept.get("PATH", os.defpath)])
    return {**kept, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
