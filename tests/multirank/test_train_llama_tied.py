"""The flagship example with embedding and head as one matrix, of which both ends of a pipeline have a copy."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from llama.config import LlamaConfig
from llama.meshes import MeshPlan, make_mesh
from llama.parallel import Ways, place

from disttrain.pipelining import make_schedule
from disttrain.testing import RankPool
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.llama import SIZES, losses, trained, write_text

RUN = ("--model", f"{SIZES},is_tied=true", "--seq", "16", "--batch", "16", "--lr", "0.01", "--seed", "1")
RUN += ("--dtype", "fp64", "--steps", "4", "--eval-every", "4", "--sample", "0")
MESHES = {
    "pp=4": ("--recompute",),
    "pp=2,dp=2": ("--schedule", "Interleaved1F1B"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("llama") / "text")


def run(rank_pool: RankPool, mesh: str, out: Path, *flags: str) -> dict[str, list[float]]:
    num_ranks = math.prod(int(part.partition("=")[2]) for part in mesh.split(","))
    arguments = [*flags, "--mesh", mesh, "--out", str(out)]
    rank_pool.run(num_ranks, trained, {"arguments": arguments}, timeout_s=360)
    return losses(out)


@pytest.fixture(scope="module")
def alone(rank_pool: RankPool, text: Path) -> Path:
    """One process, with a save half-way."""
    out = text.parent / "alone"
    found = run(rank_pool, "dp=1", out, *RUN, "--data", str(text), "--save-every", "2")
    assert found["held_out_loss"][-1] < found["held_out_loss"][0] - 0.3
    return out


@pytest.fixture(scope="module")
def piped(rank_pool: RankPool, text: Path) -> Path:
    """A pipeline, with a save half-way."""
    out = text.parent / "piped"
    run(rank_pool, "pp=2", out, *RUN, "--data", str(text), "--save-every", "2")
    return out


@pytest.mark.parametrize("mesh", MESHES)
def test_pipelines_follow_a_single_process(
    rank_pool: RankPool, text: Path, alone: Path, tmp_path: Path, mesh: str
) -> None:
    found = run(rank_pool, mesh, tmp_path, *RUN, *MESHES[mesh], "--data", str(text), "--save-every", "0")
    assert len(found["loss"]) == 4
    for name, expected in losses(alone).items():
        assert found[name] == pytest.approx(expected, rel=1e-12, abs=0)


def test_a_pipeline_that_saves_follows_it_too(alone: Path, piped: Path) -> None:
    for name, expected in losses(alone).items():
        assert losses(piped)[name] == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize(("saved", "mesh"), [("piped", "dp=1"), ("piped", "pp=4"), ("alone", "pp=2,tp=2")])
def test_a_save_goes_on_with_and_without_a_pipeline(
    request: pytest.FixtureRequest, rank_pool: RankPool, alone: Path, tmp_path: Path, saved: str, mesh: str
) -> None:
    out = tmp_path / "resumed"
    shutil.copytree(request.getfixturevalue(saved), out)
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    found = run(rank_pool, mesh, out, "--resume", "--sample", "0")
    assert len(found["loss"]) == 4
    for name, expected in losses(alone).items():
        assert found[name] == pytest.approx(expected, rel=1e-12, abs=0)


@on_ranks(2)
def test_both_ends_have_the_matrix_under_both_names() -> None:
    config = LlamaConfig(dim=32, num_layers=4, num_heads=4, num_kv_heads=4, hidden_size=64, is_tied=True)
    mesh = make_mesh(MeshPlan(pp=2), torch.device("cpu"))
    model = place(config, mesh, make_schedule("1F1B", 2, 2), Ways("fp64"), length=16, seed=3).model
    assert model.get_parameter("embedding.weight") is model.get_parameter("head.weight")
    alone = place(
        config,
        make_mesh(MeshPlan(dp=2), torch.device("cpu")),
        None,
        Ways("fp64"),
        length=16,
        seed=3,
    ).model
    whole = [one.get_parameter("embedding.weight").full_tensor() for one in (model, alone)]
    assert torch.equal(*whole)
