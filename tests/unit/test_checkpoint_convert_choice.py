"""Which part of a save is converted: what is asked for, or the model where a format cannot hold the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

from disttrain.checkpoint import Checkpointer, RngState, get_state_dict, load_full, save, training_state
from disttrain.checkpoint.cli import main
from disttrain.checkpoint.interop import convert
from disttrain.errors import CheckpointError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(3)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.norm(model.head(model.embed(torch.arange(3))).sum(-1)).sum().backward()
    optimizer.step()
    return model, optimizer


def ours(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {**training_state(model, optimizer), "rng": RngState(), "step": 4}


def torchs(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "rng": RngState(), "step": 4}


def modules(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model, "rng": RngState(), "step": 4, "optimizer": training_state(model, optimizer)["optimizer"]}


def equal(found: dict[str, torch.Tensor], model: nn.Module) -> bool:
    """The tied tensor is there once; twice where the state had two objects for it, as torch's state dicts have."""
    own = model.state_dict()
    if "head.weight" not in found:
        own.pop("head.weight")
    return found.keys() == own.keys() and all(torch.equal(found[name], own[name]) for name in own)


@pytest.mark.parametrize("state", [ours, torchs, modules])
def test_a_training_state_becomes_its_models_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: Any
) -> None:
    model, optimizer = trained()
    Checkpointer(tmp_path).save(1, state(model, optimizer))
    source, target = str(tmp_path / "step-00000001"), tmp_path / "hf"
    assert main(["convert", source, str(target), "--to", "safetensors"]) == 0
    assert equal(load_file(target / "model.safetensors"), model)
    assert f"{target}: without optimizer, rng, step; --only and --without say what else" in capsys.readouterr().out
    # A file of the model alone, and one that was asked for, have the same names.
    assert convert(source, tmp_path / "only", "safetensors", only="model") == ("optimizer", "rng", "step")
    assert equal(load_file(tmp_path / "only" / "model.safetensors"), model)
    save({"model": model}, tmp_path / "alone")
    assert convert(tmp_path / "alone", tmp_path / "hf2", "safetensors") == ()
    assert equal(load_file(tmp_path / "hf2" / "model.safetensors"), model)


def test_parts_are_chosen_for_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained()
    save(ours(model, optimizer), tmp_path / "save")
    source = str(tmp_path / "save")
    for form in ("dcp", "disttrain"):
        assert main(["convert", source, str(tmp_path / "x"), "--to", form]) == 2
        assert "--without rng (in Python without='rng')" in capsys.readouterr().err
    assert main(["convert", source, str(tmp_path / "dcp"), "--to", "dcp", "--without", "rng"]) == 0
    assert main(["convert", source, str(tmp_path / "own"), "--to", "disttrain", "--without", "rng"]) == 0
    assert sorted(load_full(tmp_path / "own")) == ["model", "optimizer", "step"]
    # What torch's own format became is a model's file too.
    assert main(["convert", str(tmp_path / "dcp"), str(tmp_path / "hf"), "--to", "safetensors"]) == 0
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == set(model.state_dict())
    convert(source, tmp_path / "some", "safetensors", only=["model/norm.*", "optimizer/norm.*/state/exp_avg"])
    assert set(load_file(tmp_path / "some" / "model.safetensors")) == {
        "model.norm.weight",
        "model.norm.bias",
        "optimizer.norm.weight.state.exp_avg",
        "optimizer.norm.bias.state.exp_avg",
    }
    left_out = convert(source, tmp_path / "head", "safetensors", only="model", without="model/embed.weight")
    assert set(load_file(tmp_path / "head" / "model.safetensors")) == {"head.weight", "norm.weight", "norm.bias"}
    assert left_out == ("model/embed.weight", "optimizer", "rng", "step")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torchs_own_saves_become_models_files(tmp_path: Path) -> None:
    model, optimizer = trained()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert "optim" in convert(tmp_path / "dcp", tmp_path / "hf", "safetensors")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(found["norm.weight"], model.norm.weight)
    torch.save({"model": model_state, "step": 3}, tmp_path / "x.pt")
    assert convert(tmp_path / "x.pt", tmp_path / "hf2", "safetensors") == ("step",)
    assert equal(load_file(tmp_path / "hf2" / "model.safetensors"), model)


def test_whole_states_of_tensors_keep_all_names(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(2)}}, tmp_path / "save")
    assert convert(tmp_path / "save", tmp_path / "hf", "safetensors") == ()
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == {"model.w", "ema.w"}


def test_who_must_say_what_the_model_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save({"net": {"w": torch.ones(2)}, "optim": {"m": torch.ones(2)}, "step": 3}, tmp_path / "save")
    source = str(tmp_path / "save")
    assert main(["convert", source, str(tmp_path / "hf"), "--to", "safetensors"]) == 2
    said = capsys.readouterr().err
    assert "'step' has no place in safetensors, which hold tensors alone" in said
    assert "--only NAME (in Python only=), or what is not, --without NAME, of net, optim, step." in said
    assert main(["convert", source, str(tmp_path / "hf"), "--to", "safetensors", "--only", "net"]) == 0
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == {"w"}
    assert main(["convert", source, str(tmp_path / "hf2"), "--to", "safetensors", "--without", "step"]) == 0
    assert set(load_file(tmp_path / "hf2" / "model.safetensors")) == {"net.w", "optim.m"}
    for flag in ("--only", "--without"):
        assert main(["convert", source, str(tmp_path / "hf3"), "--to", "dcp", flag, "nothing"]) == 2
        assert "the save has no 'nothing'. It has net, optim, step." in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"'step' is no tensor.*--without step"):
        convert(source, tmp_path / "hf3", "safetensors", only=["net", "step"])
