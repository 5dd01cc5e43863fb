"""The flagship example on up to eight ranks: whatever the mesh, and when it changes, the losses of a single process."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from disttrain.testing import RankPool
from tests.llama_cases import SMALL, losses, trained, write_text

RUN = (*SMALL, "--steps", "4", "--eval-every", "4", "--sample", "2")
MESHES = {
    "dp=4": ("--microbatches", "2", "--reduce-each"),
    "tp=4": ("--recompute",),
    "dp=2,tp=2": ("--kernels",),
    "pp=4": ("--recompute",),
    "pp=2,tp=2": ("--kernels", "--schedule", "GPipe"),
    # Nothing else starts so many ranks, so that these come last.
    "replicate=2,dp=2,tp=2": ("--microbatches", "2"),
    "dp=2,tp=2,pp=2": ("--schedule", "ZBV", "--microbatches", "4"),
    "pp=2,replicate=2,dp=2": ("--schedule", "Interleaved1F1B"),
}
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 301,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
}
"""With a vocabulary that no mesh divides, and fewer heads of keys and values than tp has ranks."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("llama") / "text")


@pytest.fixture(scope="module")
def run_flags(text: Path) -> list[str]:
    model = text.parent / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    return [*RUN, "--model", str(model), "--save-every", "0", "--data", str(text)]


@pytest.fixture(scope="module")
def alone(rank_pool: RankPool, text: Path, run_flags: list[str]) -> dict[str, list[float]]:
    """The losses of one process."""
    out = text.parent / "alone"
    rank_pool.run(1, trained, {"arguments": [*run_flags, "--out", str(out)]})
    found = losses(out)
    assert found["held_out_loss"][-1] < found["held_out_loss"][0] - 0.3
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_all_meshes_follow_a_single_process(
    rank_pool: RankPool, run_flags: list[str], tmp_path: Path, alone: dict[str, list[float]], mesh: str
) -> None:
    flags = [*run_flags, "--out", str(tmp_path), "--mesh", mesh, *MESHES[mesh]]
    num_ranks = math.prod(int(part.partition("=")[2]) for part in mesh.split(","))
    rank_pool.run(num_ranks, trained, {"arguments": flags}, timeout_s=100)
    found = losses(tmp_path)
    assert len(found["loss"]) == 4
    for name, expected in alone.items():
        assert found[name] == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, text: Path) -> Path:
    """A whole run on one mesh, with a save half-way, and its weights in Hugging Face's form."""
    out = text.parent / "saved"
    flags = [*SMALL, "--steps", "6", "--save-every", "3", "--eval-every", "6", "--sample", "0", "--data", str(text)]
    flags += ["--mesh", "dp=2,tp=2", "--out", str(out), "--export", str(text.parent / "exported")]
    rank_pool.run(4, trained, {"arguments": flags}, timeout_s=100)
    return out


@pytest.mark.parametrize(
    ("num_ranks", "flags", "tolerance"),
    [
        (4, ("--mesh", "dp=2,tp=2"), 0.0),
        (4, ("--mesh", "pp=2,dp=2", "--schedule", "ZBV", "--microbatches", "4"), 1e-12),
        (1, (), 1e-12),
    ],
)
def test_a_save_goes_on_on_any_mesh_as_if_nothing_had_happened(
    rank_pool: RankPool, saved: Path, tmp_path: Path, num_ranks: int, flags: tuple[str, ...], tolerance: float
) -> None:
    out = tmp_path / "resumed"
    shutil.copytree(saved, out)
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    arguments = ["--resume", "--out", str(out), "--sample", "0", *flags]
    rank_pool.run(num_ranks, trained, {"arguments": arguments}, timeout_s=100)
    undisturbed, resumed = losses(saved), losses(out)
    assert len(resumed["loss"]) == 6
    for name, expected in undisturbed.items():
        assert resumed[name] == pytest.approx(expected, rel=tolerance, abs=0)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]


def test_weights_that_were_exported_are_those_that_were_trained(
    rank_pool: RankPool, saved: Path, tmp_path: Path
) -> None:
    flags = ["--model", str(saved.parent / "exported"), "--data", str(saved.parent / "text"), "--out", str(tmp_path)]
    flags += ["--seq", "16", "--batch", "16", "--dtype", "fp64", "--steps", "1", "--save-every", "0", "--sample", "0"]
    rank_pool.run(2, trained, {"arguments": [*flags, "--mesh", "tp=2"]})
    first_loss = losses(tmp_path)["held_out_loss"][0]
    assert first_loss == pytest.approx(losses(saved)["held_out_loss"][-1], rel=1e-12)
