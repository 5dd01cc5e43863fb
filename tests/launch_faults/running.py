"""Plays in namespaces of their own, several at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.launch_faults.play import Result

ROOT = Path(__file__).parents[2]
NAMESPACES = ("--net", "--ipc", "--mount", "--pid", "--fork", "--mount-proc")
PLAY_S = 200.0


def unshare() -> list[str]:
    """The command that makes namespaces; who is not root needs one of users around them."""
    return ["unshare", *(() if os.geteuid() == 0 else ("--user", "--map-root-user")), *NAMESPACES]


def play_seed(seed: int, folder: Path) -> Result:
    """Play it in `folder`, which is its own. Raises CalledProcessError when that was not possible."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DISTTRAIN_", "OMP_", "PET_"))}
    played = subprocess.run(
        [*unshare(), sys.executable, "-m", "tests.launch_faults.play", str(seed), str(folder)],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'launcher'}", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=PLAY_S,
        check=True,
    )
    return Result(**json.loads(played.stdout))


def play_all(seeds: Iterable[int], folder: Path, num_at_once: int) -> Iterator[Result]:
    """In the order of seeds."""

    def play_one(seed: int) -> Result:
        own = folder / str(seed)
        own.mkdir()
        return play_seed(seed, own)

    with ThreadPoolExecutor(num_at_once) as pool:
        yield from pool.map(play_one, seeds)
