"""The flagship example on up to eight ranks: whatever the mesh, and when it changes, the losses of a single process."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from disttrain.testing import RankPool
from tests.cases.llama import SMALL, losses, trained, write_text

RUN = (*SMALL, "--steps", "3", "--eval-every", "3", "--sample", "2")
MESHES = {
    "dp=4": ("--microbatches", "2", "--reduce-each"),
    "tp=4": ("--recompute",),
    "pp=2,tp=2": ("--kernels", "--schedule", "GPipe"),
    "replicate=2,tp=2": ("--microbatches", "2"),
    "cp=3": ("--kernels", "--recompute"),
    "dp=2,cp=2": ("--microbatches", "2"),
    "cp=2,tp=2": ("--recompute",),
    "cp=2,pp=2": ("--schedule", "1F1B"),
    # dp=2,tp=2 is the mesh of the save below; pipelines of four ranks are those of test_train_llama_tied.
    # Nothing else starts so many ranks, so that these come last.
    "dp=2,tp=2,pp=2": ("--schedule", "ZBV", "--microbatches", "4"),
    "pp=2,replicate=2,dp=2": ("--schedule", "Interleaved1F1B"),
}
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 301,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
}
"""With a vocabulary that no mesh divides, and fewer heads of keys and values than tp has ranks."""
NUM_STAGES = {"dp=2,tp=2,pp=2": 4, "pp=2,replicate=2,dp=2": 4}
"""Each has a layer; where there are fewer there are two layers."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("llama") / "text")


Run = Callable[..., dict[str, list[float]]]


@pytest.fixture(scope="module")
def run(rank_pool: RankPool, text: Path) -> Run:
    """Runs the example, and gives its losses."""

    def losses_of(num_layers: int, num_ranks: int, out: Path, *flags: str) -> dict[str, list[float]]:
        model = text.parent / f"model-{num_layers}"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": num_layers}))
        paths = ("--model", str(model), "--data", str(text), "--out", str(out))
        rank_pool.run(num_ranks, trained, {"arguments": [*RUN, *paths, "--save-every", "0", *flags]}, timeout_s=360)
        return losses(out)

    return losses_of


@pytest.fixture(scope="module")
def alone(run: Run, text: Path) -> dict[int, dict[str, list[float]]]:
    """The losses of one process, by the number of layers."""
    found = {num_layers: run(num_layers, 1, text.parent / f"alone-{num_layers}") for num_layers in (2, 4)}
    for losses_of_one in found.values():
        assert losses_of_one["held_out_loss"][-1] < losses_of_one["held_out_loss"][0] - 0.3
    return found


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mesh", MESHES)
def test_all_meshes_follow_a_single_process(
    run: Run, tmp_path: Path, alone: dict[int, dict[str, list[float]]], mesh: str
) -> None:
    num_ranks = math.prod(int(part.partition("=")[2]) for part in mesh.split(","))
    num_layers = NUM_STAGES.get(mesh, 2)
    found = run(num_layers, num_ranks, tmp_path, "--mesh", mesh, *MESHES[mesh])
    assert len(found["loss"]) == 3
    for name, expected in alone[num_layers].items():
        assert found[name] == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, text: Path) -> Path:
    """A whole run on one mesh, with a save half-way, and its weights in Hugging Face's form."""
    out = text.parent / "saved"
    flags = [*SMALL, "--steps", "4", "--save-every", "2", "--eval-every", "4", "--sample", "0", "--data", str(text)]
    flags += ["--mesh", "dp=2,tp=2", "--out", str(out), "--export", str(text.parent / "exported")]
    rank_pool.run(4, trained, {"arguments": flags}, timeout_s=360)
    return out


@pytest.mark.sweep(2)
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
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    arguments = ["--resume", "--out", str(out), "--sample", "0", *flags]
    rank_pool.run(num_ranks, trained, {"arguments": arguments}, timeout_s=360)
    undisturbed, resumed = losses(saved), losses(out)
    assert len(resumed["loss"]) == 4
    for name, expected in undisturbed.items():
        assert resumed[name] == pytest.approx(expected, rel=tolerance, abs=0)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]


def test_weights_that_were_exported_are_those_that_were_trained(
    rank_pool: RankPool, saved: Path, tmp_path: Path
) -> None:
    flags = ["--model", str(saved.parent / "exported"), "--data", str(saved.parent / "text"), "--out", str(tmp_path)]
    flags += ["--seq", "16", "--batch", "16", "--dtype", "fp64", "--steps", "1", "--save-every", "0", "--sample", "0"]
    rank_pool.run(2, trained, {"arguments": [*flags, "--mesh", "tp=2"]})
    first_loss = losses(tmp_path)["held_out_loss"][0]
    assert first_loss == pytest.approx(losses(saved)["held_out_loss"][-1], rel=1e-12)
