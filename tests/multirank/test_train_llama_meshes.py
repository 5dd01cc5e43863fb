"""The flagship example on eight ranks: whatever the mesh, the losses of a single process."""

from __future__ import annotations

from pathlib import Path

import pytest

from disttrain.testing import RankPool
from tests.llama_cases import SMALL, losses, trained, write_text

RUN = (*SMALL, "--steps", "4", "--eval-every", "4", "--sample", "2")
MESHES = {
    "dp=8": (),
    "replicate=2,dp=2,tp=2": ("--microbatches", "2"),
    "tp=8": ("--recompute",),
    "dp=2,tp=4": ("--kernels",),
    "dp=2,tp=2,pp=2": ("--schedule", "ZBV", "--microbatches", "4"),
    "pp=4,dp=2": ("--recompute",),
    "pp=2,replicate=2,dp=2": ("--schedule", "Interleaved1F1B"),
    "pp=4,tp=2": ("--kernels", "--schedule", "GPipe"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("llama") / "text")


@pytest.fixture(scope="module")
def alone(rank_pool: RankPool, text: Path) -> dict[str, list[float]]:
    """The losses of one process."""
    out = text.parent / "alone"
    rank_pool.run(1, trained, {"arguments": [*RUN, "--save-every", "0", "--data", str(text), "--out", str(out)]})
    found = losses(out)
    assert found["held_out_loss"][-1] < found["held_out_loss"][0] - 0.3
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_all_meshes_follow_a_single_process(
    rank_pool: RankPool, text: Path, tmp_path: Path, alone: dict[str, list[float]], mesh: str
) -> None:
    flags = [*RUN, "--save-every", "0", "--data", str(text), "--out", str(tmp_path), "--mesh", mesh, *MESHES[mesh]]
    rank_pool.run(8, trained, {"arguments": flags}, timeout_s=100)
    found = losses(tmp_path)
    assert len(found["loss"]) == 4
    for name, expected in alone.items():
        assert found[name] == pytest.approx(expected, rel=1e-12, abs=0)
