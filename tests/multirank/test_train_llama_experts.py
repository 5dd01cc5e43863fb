"""The flagship example with experts: whatever the mesh, the losses of a single process, and the loads of experts."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from disttrain.testing import RankPool
from tests.cases.llama import SMALL, losses, trained, write_text

EXPERTS = ("--experts", "4", "--top-k", "2", "--shared-experts", "1", "--sample", "2")
MESHES = {
    "ep=2": ("--recompute",),
    "dp=2,ep=2": ("--save-every", "2"),
    "replicate=2,ep=2": (),
    "tp=2": (),
    "tp=2,ep=2": (),
    "cp=2": (),
    "ep=2,cp=2": (),
    "pp=2": ("--microbatches", "1", "--schedule", "GPipe"),
}
"""Of a batch that one process has as one microbatch: losses of routers are of each microbatch."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("llama") / "text")


Run = Callable[..., dict[str, list[float]]]


@pytest.fixture(scope="module")
def run(rank_pool: RankPool, text: Path) -> Run:
    """Runs the example, and gives its losses."""

    def losses_of(num_ranks: int, out: Path, *flags: str, num_steps: int = 4) -> dict[str, list[float]]:
        steps = ("--steps", str(num_steps), "--eval-every", "4", "--data", str(text), "--out", str(out))
        arguments = [*SMALL, *EXPERTS, *steps, "--save-every", "0", *flags]
        rank_pool.run(num_ranks, trained, {"arguments": arguments}, timeout_s=360)
        return losses(out)

    return losses_of


@pytest.fixture(scope="module")
def alone(run: Run, text: Path) -> Path:
    """The folder of a run of one process."""
    out = text.parent / "alone"
    found = run(1, out)
    assert found["held_out_loss"][-1] < found["held_out_loss"][0] - 0.3
    return out


def loads(out: Path) -> list[list[float]]:
    with (out / "experts.csv").open(newline="", encoding="utf-8") as file:
        return [[float(load) for load in row[2:]] for row in csv.reader(file)]


@pytest.mark.parametrize("mesh", MESHES)
def test_all_meshes_follow_a_single_process(run: Run, tmp_path: Path, alone: Path, mesh: str) -> None:
    num_ranks = math.prod(int(part.partition("=")[2]) for part in mesh.split(","))
    found, expected = run(num_ranks, tmp_path / "run", "--mesh", mesh, *MESHES[mesh]), losses(alone)
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-9)
    assert all(sum(row) == pytest.approx(4, abs=1e-3) for row in loads(tmp_path / "run"))
    if "pp" not in mesh:
        assert loads(tmp_path / "run") == loads(alone)


def test_a_run_goes_on_with_its_experts_elsewhere(run: Run, tmp_path: Path, alone: Path) -> None:
    """Saved by ep=2, loaded by dp=2 and by one process."""
    out = tmp_path / "run"
    run(2, out, "--mesh", "ep=2", "--save-every", "2", num_steps=2)
    found = run(2, out, "--resume", "--mesh", "dp=2", "--save-every", "0")
    assert found["loss"] == pytest.approx(losses(alone)["loss"], rel=1e-9)
    assert loads(out) == loads(alone)
