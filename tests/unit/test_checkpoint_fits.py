"""Loads that need not fit: what may be missing, unexpected, mismatched, renamed or converted, and what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain.checkpoint import LoadReport, PerRank, Unfilled, Value, load, load_full, save
from disttrain.checkpoint.stateful import make_plain
from disttrain.errors import CheckpointCorruptError, CheckpointError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {
        "model": {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2), "old.name": torch.full((2,), 7.0)},
        "step": 5,
        "options": Value({"lr": 0.5}),
        "seeds": PerRank([1, 2]),
    }
    save(state, tmp_path / "save")
    return tmp_path / "save"


def test_what_fits_is_reported_as_such(saved: Path) -> None:
    state: dict[str, Any] = {"model": Unfilled(make_plain), "step": 0, "options": Value({}), "seeds": PerRank(None)}
    report = load(state, saved)
    assert (report, bool(report)) == (LoadReport(mismatched={}), False)
    assert state["model"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_each_misfit_is_an_error_until_it_is_allowed(saved: Path) -> None:
    def state() -> dict[str, Any]:
        return {"model": {"w": torch.zeros(2, 3), "b": torch.zeros(3), "new": torch.full((1,), 9.0)}, "step": 0}

    with pytest.raises(CheckpointError) as caught:
        load(state(), saved)
    assert caught.value.problem == (
        f"{saved} does not fit: the save lacks model/new; the state lacks model/old.name, options, seeds; "
        "model/b is float32[2] there, float32[3] here."
    )
    with pytest.raises(CheckpointError, match=r"does not fit: model/b is float32\[2\] there"):
        load(state(), saved, allow=["missing", "unexpected"])
    loaded = state()
    report = load(loaded, saved, allow=["missing", "unexpected", "mismatched"])
    assert report == LoadReport(
        ("model/new",),
        ("model/old.name", "options", "seeds"),
        {"model/b": "model/b is float32[2] there, float32[3] here"},
    )
    assert bool(report)
    assert [loaded["model"][name].tolist() for name in ("w", "b", "new")] == [[[0, 1, 2], [3, 4, 5]], [0, 0, 0], [9]]
    assert loaded["step"] == 5


def test_a_value_in_a_tensors_place_stays_when_that_is_allowed(saved: Path) -> None:
    state = {"model": 1, "step": torch.zeros(1)}
    report = load(state, saved, allow=["missing", "unexpected", "mismatched"])
    assert report.mismatched == {"step": "step is a value there, a tensor here"}
    assert (state["model"], state["step"].tolist()) == (1, [0])  # type: ignore[attr-defined]


def test_dtypes_change_where_they_are_asked_to(saved: Path) -> None:
    state = {"model": {"w": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(2, dtype=torch.float64)}}
    with pytest.raises(CheckpointError, match=r"model/b is float32\[2\] there, float64\[2\] here\."):
        load(state, saved, allow=["unexpected"], convert="model/w")
    report = load(state, saved, allow=["unexpected"], convert="model/*")
    assert report.converted == ("model/b", "model/w")
    assert (state["model"]["w"].tolist(), state["model"]["b"].tolist()) == ([[0, 1, 2], [3, 4, 5]], [1, 1])
    assert state["model"]["w"].dtype == torch.bfloat16


def test_complex_numbers_do_not_lose_half_of_themselves(tmp_path: Path) -> None:
    save({"x": torch.ones(2, dtype=torch.complex64)}, tmp_path / "save")
    with pytest.raises(CheckpointError, match="x is complex64"):
        load({"x": torch.zeros(2)}, tmp_path / "save", convert="*")


@pytest.mark.parametrize("rename", [{"model/old.name": "model/new"}, lambda name: name.replace("old.name", "new")])
def test_renamed_keys(saved: Path, rename: Any) -> None:
    state = {"model": {"w": torch.zeros(2, 3), "b": torch.zeros(2), "new": torch.zeros(2)}}
    load(state, saved, rename=rename, allow=["unexpected"])
    assert state["model"]["new"].tolist() == [7, 7]


def test_two_names_cannot_become_one(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'model/b' and 'model/old\.name' are both renamed to 'x'"):
        load({"x": torch.zeros(2)}, saved, rename=lambda _: "x")


def test_a_misfit_of_no_known_kind_is_refused(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"allow has \['extra'\]\. There are missing, unexpected, mismatched"):
        load({}, saved, allow=["extra"])  # type: ignore[list-item]


def test_a_tied_tensor_needs_one_of_its_names(tmp_path: Path) -> None:
    save({"embed": torch.ones(2)}, tmp_path / "save")
    tied = torch.zeros(2)
    assert not load({"embed": tied, "head": tied}, tmp_path / "save")
    assert tied.tolist() == [1, 1]


def test_a_whole_save_comes_as_it_was_nested(saved: Path) -> None:
    state = load_full(saved)
    assert {name: tensor.tolist() for name, tensor in state.pop("model").items()} == {
        "w": [[0, 1, 2], [3, 4, 5]],
        "b": [1, 1],
        "old.name": [7, 7],
    }
    assert state == {"step": 5, "options": {"lr": 0.5}, "seeds": PerRank([1, 2])}


def test_a_whole_save_has_odd_names_and_tied_tensors(tmp_path: Path) -> None:
    tied = torch.ones(3, dtype=torch.bfloat16)
    save({"a/b": {"~": tied, "": tied}, "none": torch.empty(0, 4)}, tmp_path / "save")
    state = load_full(tmp_path / "save")
    assert state["a/b"]["~"] is state["a/b"][""]
    assert (state["a/b"]["~"].tolist(), state["none"].shape) == ([1, 1, 1], (0, 4))


def test_a_damaged_save_is_not_loaded_whole(saved: Path) -> None:
    data = saved / "rank-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointCorruptError, match="does not have the bytes"):
        load_full(saved)
