"""States and folders that nobody thinks of: empty containers, keys that are no text, what is no file in its place."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import disttrain.checkpoint.stateful
from disttrain import get_rank
from disttrain.checkpoint import LocalStorage, Value, load, load_full, save, training_state
from disttrain.checkpoint.cli import main
from disttrain.checkpoint.interop import load_dcp, load_safetensors, save_dcp, save_safetensors
from disttrain.checkpoint.storage.local_file import LocalFile
from disttrain.errors import CheckpointCorruptError, CheckpointError
from disttrain.testing import run_threads


def test_empty_containers_come_back(tmp_path: Path) -> None:
    state = {
        "w": torch.ones(2),
        "empty": {},
        "list": [],
        "tuple": (),
        "deep": {"a": {}, "b": {"c": {}}},
        "v": Value({}),
    }
    save(state, tmp_path / "save")
    found = load_full(tmp_path / "save")
    assert {key: found[key] for key in state if key not in ("w", "v")} == {
        key: state[key] for key in state if key not in ("w", "v")
    }
    assert found["v"] == {}
    other: dict[str, Any] = {**state, "w": torch.zeros(2), "empty": {}, "list": [1], "deep": {"a": {}, "b": {"c": {}}}}
    assert not load(other, tmp_path / "save")
    assert other["list"] == []
    with pytest.raises(CheckpointError, match=r"the save lacks empty/x; the state lacks empty"):
        load({**state, "empty": {"x": 1}}, tmp_path / "save")


class Position(NamedTuple):
    epoch: int
    offset: torch.Tensor


def test_named_tuples_come_back_into_a_state_that_has_them(tmp_path: Path) -> None:
    """And the state of a generator of numpy, whose numbers have 128 bits."""
    generator = np.random.default_rng(0)
    state = {
        "w": torch.ones(2),
        "at": Position(3, torch.ones(1)),
        "in": {"list": [Position(4, torch.ones(1)), 5]},
        "plain": (1, (2, 3)),
        "generator": generator.bit_generator.state,
    }
    save(state, tmp_path / "save")
    numbers = generator.random(3)
    other = {
        "w": torch.zeros(2),
        "at": Position(0, torch.zeros(1)),
        "in": {"list": [Position(0, torch.zeros(1)), 0]},
        "plain": (0, (0, 0)),
        "generator": np.random.default_rng(7).bit_generator.state,
    }
    load(other, tmp_path / "save")
    assert isinstance(other["at"], Position)
    assert (other["at"].epoch, other["at"].offset.tolist()) == (3, [1.0])
    assert isinstance(other["in"], dict)
    assert [type(item) for item in other["in"]["list"]] == [Position, int]
    assert other["plain"] == (1, (2, 3))
    generator.bit_generator.state = other["generator"]
    assert generator.random(3).tolist() == numbers.tolist()


def test_what_old_saves_have_no_place_for_is_not_missed(tmp_path: Path) -> None:
    """Their empty dicts were dropped."""
    save({"w": torch.ones(2)}, tmp_path / "save")
    state = {"w": torch.zeros(2), "empty": {}, "deep": {"a": {}}}
    assert not load(state, tmp_path / "save")
    assert state["w"].tolist() == [1, 1]
    with pytest.raises(CheckpointError, match="the save lacks list"):
        load({**state, "list": []}, tmp_path / "save")


def test_one_rank_has_more_where_another_has_nothing(tmp_path: Path) -> None:
    def body() -> None:
        inner = {"deep": {"w": torch.ones(2)}} if get_rank() else {}
        save({"part": inner, "step": 1}, tmp_path / "save")
        state = {"part": {"deep": {"w": torch.zeros(2)}} if get_rank() else {}, "step": 0}
        load(state, tmp_path / "save")
        assert state["step"] == 1
        assert not get_rank() or state["part"]["deep"]["w"].tolist() == [1, 1]

    run_threads(2, body)
    assert load_full(tmp_path / "save")["part"]["deep"]["w"].tolist() == [1, 1]


def test_a_leaf_above_others_has_no_place_in_a_whole(tmp_path: Path) -> None:
    run_threads(
        2, lambda: save({"x": {"y": torch.ones(2)} if get_rank() else 3, "w": torch.ones(1)}, tmp_path / "save")
    )
    with pytest.raises(CheckpointError, match="'x' is a leaf, and there are others below it"):
        load_full(tmp_path / "save")


def test_empty_dicts_in_other_formats(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    save_safetensors(training_state(model), tmp_path / "hf")
    state = training_state(torch.nn.Linear(2, 2))
    load_safetensors(state, tmp_path / "hf")
    assert torch.equal(state["model"]["weight"], model.weight)
    save_dcp(training_state(model), tmp_path / "dcp")
    state = training_state(torch.nn.Linear(2, 2))
    load_dcp(state, tmp_path / "dcp")
    assert torch.equal(state["model"]["bias"], model.bias)


class Counted(disttrain.checkpoint.stateful.Stateful):
    def state_dict(self) -> dict[Any, Any]:
        return {3: torch.ones(2)}

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({0: torch.ones(2)}, r"the state has the key 0 \(int\); keys must be text, they become names\. Write '0', or"),
        ({None: 1}, r"the state has the key None \(NoneType\)"),
        ({("a", 1): torch.ones(2)}, r"the state has the key \('a', 1\) \(tuple\)"),
        ({"x": Counted()}, r"'x' has the key 3 \(int\)"),
    ],
)
def test_keys_are_text(tmp_path: Path, state: dict[Any, Any], sentence: str) -> None:
    for call in (save, load):
        if call is load:
            save({"w": torch.ones(1)}, tmp_path / "save")
        with pytest.raises(CheckpointError, match=sentence) as raised:
            call(state, tmp_path / "save")
        assert "Error" not in str(raised.value)


def test_dicts_with_other_keys_are_values(tmp_path: Path) -> None:
    save({"w": torch.ones(1), "by_number": {0: {"exp_avg": torch.arange(3)}, "x": {1: 2}}}, tmp_path / "save")
    found = load_full(tmp_path / "save")["by_number"]
    assert found[0]["exp_avg"].tolist() == [0, 1, 2]
    assert found["x"] == {1: 2}


class Named(torch.optim.SGD, disttrain.checkpoint.stateful.Stateful):
    """As trainers have one: an optimizer, and a Stateful with names of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.param_groups[0]["lr"], "moment": torch.full((2,), 7.0)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.param_groups[0]["lr"] = state_dict["rate"]


class Overriding(torch.optim.SGD):
    state_dict = Named.state_dict
    load_state_dict = Named.load_state_dict


class Wrapped(torch.nn.Linear, disttrain.checkpoint.stateful.Stateful):
    """A module that says what its state is."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"only": self.weight}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        assert list(state_dict) == ["only"]


def test_a_stateful_is_taken_by_its_own_state(tmp_path: Path) -> None:
    for number, kind in enumerate((Named, Overriding)):
        weight = torch.nn.Parameter(torch.ones(2))
        save({"optim": kind([weight], lr=0.5)}, tmp_path / f"{number}")
        assert sorted(load_full(tmp_path / f"{number}")["optim"]) == ["moment", "rate"]
        other = kind([weight], lr=0.25)
        load({"optim": other}, tmp_path / f"{number}")
        assert other.param_groups[0]["lr"] == 0.5
    module = Wrapped(2, 2)
    save({"model": module}, tmp_path / "module")
    other_module = Wrapped(2, 2)
    load({"model": other_module}, tmp_path / "module")
    assert torch.equal(other_module.weight, module.weight)
    assert not torch.equal(other_module.bias, module.bias)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [pipe, folder, device, loop])
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "manifest.json"])
def test_what_is_no_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, make: Callable[[Path], None]
) -> None:
    save({"w": torch.ones(2), "v": 1}, tmp_path / "save")
    (tmp_path / "save" / name).unlink()
    make(tmp_path / "save" / name)
    sentence = f"{name} cannot be read: .*(It is a (pipe|folder|device)|Too many levels of symbolic links)"
    with pytest.raises(CheckpointError, match=sentence):
        load({"w": torch.zeros(2), "v": 0}, tmp_path / "save")
    with pytest.raises(CheckpointError, match=sentence):
        load_full(tmp_path / "save")
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read|has no manifest"):
        load_full(f"file://{tmp_path}/save")
    assert main(["verify", str(tmp_path / "save")]) == 1
    assert f"{name} cannot be read" in "".join(capsys.readouterr())


def test_an_error_of_the_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"w": torch.ones(2)}, tmp_path / "save")

    class Failing(LocalStorage):
        @contextmanager
        def open_file(self, path: Path) -> Any:
            file = LocalFile(path)
            if path.suffix == ".safetensors":
                file.read_at = self.fail  # type: ignore[method-assign]
            yield file
            file.close()

        def fail(self, offset: int, buffer: memoryview) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(CheckpointCorruptError, match=r"rank-00000\.safetensors cannot be read: .*Input/output error"):
        load_full(tmp_path / "save", storage=Failing())


def test_no_verdict_on_one_save_keeps_the_others_from_theirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        save({"w": torch.ones(2)}, tmp_path / f"step-0000000{step}")
    (tmp_path / "step-00000001" / "manifest.json").write_bytes(b"{}")
    assert main(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "step-00000001: damaged" in said
    assert "step-00000002: whole" in said


def test_a_tensor_that_no_memory_holds_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"w": torch.ones(2)}, tmp_path / "save")

    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("disttrain.checkpoint.loading.whole._empty", fail)
    with pytest.raises(CheckpointError, match="there is no memory for the 8 bytes of 'w': DefaultCPU"):
        load_full(tmp_path / "save")


@pytest.mark.parametrize("num_elements", [1, 3])
def test_a_tensor_with_gaps_between_its_elements(tmp_path: Path, num_elements: int) -> None:
    numbers = torch.view_as_complex(torch.arange(1.0, 1 + 2 * num_elements).view(-1, 2))
    views = {"imag": numbers.imag, "conj": numbers.conj(), "neg": numbers.conj().imag}
    save(dict(views), tmp_path / "save")
    found = load_full(tmp_path / "save")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: view.tolist() for name, view in views.items()
    }
