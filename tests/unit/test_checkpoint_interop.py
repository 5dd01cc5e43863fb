"""Other formats: what torch and safetensors write is read, what is written they read, and nothing is run."""

from __future__ import annotations

import math
import pickle
import zipfile
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from disttrain._python.pickles import parse
from disttrain.checkpoint import LocalStorage, PerRank, Value, load, load_full, save
from disttrain.checkpoint.cli import main
from disttrain.checkpoint.interop import convert, load_dcp, load_safetensors, load_torch, save_dcp, save_safetensors
from disttrain.checkpoint.storage.base import ReadableFile
from disttrain.errors import CheckpointError
from tests.cases.checkpoints import as_bytes, nested, tensors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

# torch.distributed.checkpoint


def test_what_torch_saved_is_loaded(tmp_path: Path) -> None:
    dcp.save(nested(3), checkpoint_id=tmp_path / "dcp")
    state = nested(1)
    assert not load_dcp(state, tmp_path / "dcp")
    assert as_bytes(state["model"]) == as_bytes(nested(3)["model"])
    assert {name: state[name] for name in ("step", "note", "ratios")} == {
        name: nested(3)[name] for name in ("step", "note", "ratios")
    }


def test_torch_loads_what_is_saved_for_it(tmp_path: Path) -> None:
    save_dcp(nested(3), tmp_path / "dcp")
    state = nested(1)
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert as_bytes(state["model"]) == as_bytes(nested(3)["model"])
    assert (state["step"], state["ratios"]) == (3, nested(3)["ratios"])
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


def test_torch_loads_both_names_of_a_tied_tensor(tmp_path: Path) -> None:
    tied = torch.ones(4)
    save_dcp({"a": tied, "b": tied}, tmp_path / "dcp")
    state = {"a": torch.zeros(4), "b": torch.zeros(4)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert (state["a"].tolist(), state["b"].tolist()) == ([1] * 4, [1] * 4)


def test_a_flat_state_of_torch_fits_a_nested_one(tmp_path: Path) -> None:
    dcp.save({"model.w": torch.ones(2), "list": [torch.ones(1), 5]}, checkpoint_id=tmp_path / "dcp")
    state: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "list": {"0": torch.zeros(1), "1": 0}}
    load_dcp(state, tmp_path / "dcp")
    assert (state["model"]["w"].tolist(), state["list"]["0"].tolist(), state["list"]["1"]) == ([1, 1], [1], 5)


def test_misfits_are_told_as_for_a_save(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), "old": torch.ones(1)}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(CheckpointError, match=r"the save lacks new; the state lacks old; w is float32\[2\] there"):
        load_dcp({"w": torch.zeros(3), "new": torch.zeros(1)}, tmp_path / "dcp")
    state = {"w": torch.zeros(2, dtype=torch.float64), "new": torch.zeros(1)}
    report = load_dcp(state, tmp_path / "dcp", rename={"old": "new"}, convert="w")
    assert (report.converted, state["w"].tolist(), state["new"].tolist()) == (("w",), [1, 1], [1])


class Malicious:
    """Makes a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return Path.touch, (self.proof,)


def test_a_pickle_that_would_run_code_is_refused_and_not_run(tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Malicious(proof)))
    with pytest.raises(CheckpointError, match=r"would make pathlib\.Path\.touch|would make .*getattr"):
        load_dcp({"w": torch.zeros(2)}, tmp_path / "dcp")
    dcp.save({"w": Malicious(proof)}, checkpoint_id=tmp_path / "second")
    with pytest.raises(CheckpointError, match="would run"):
        load_dcp({"w": 0}, tmp_path / "second")
    torch.save({"w": Malicious(proof)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="would run"):
        load_torch({"w": 0}, tmp_path / "x.pt")
    assert not proof.exists()
    pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())  # noqa: S301  ours, and what it makes is the proof
    assert proof.exists()


def test_values_that_hold_each_other_many_times_are_refused(tmp_path: Path) -> None:
    twice: Any = []
    for _ in range(60):
        twice = [twice, twice]
    by_name: Any = {}
    for _ in range(60):
        by_name = {"a": by_name, "b": by_name}
    itself: Any = []
    itself.append(itself)
    crafted = {
        "so often": [pickle.dumps(value, protocol=2) for value in (twice, by_name)],
        "holds itself": [pickle.dumps(itself, protocol=2)],
        "more than 500 deep": [b"\x80\x02" + b"]" * 900 + b"a" * 899 + b"."],  # each list is put into the one before
    }
    for said, pickles in crafted.items():
        for pickled in pickles:
            with pytest.raises(ValueError, match=said):
                parse(pickled)
            with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
                archive.writestr("archive/data.pkl", pickled)
            with pytest.raises(CheckpointError, match=said):
                load_torch({"w": 0}, tmp_path / "x.pt")
    shared = list(range(100))
    assert parse(pickle.dumps([shared] * 1000, protocol=2)) == [shared] * 1000


def test_paths_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp")
    metadata = tmp_path / "dcp" / ".metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"__0_0.distcp", b"../00.distcp"))
    with pytest.raises(CheckpointError, match=r"lacks or misspells file name '\.\./00\.distcp'"):
        load_dcp({"w": torch.zeros(2)}, tmp_path / "dcp")


def damaged(data: bytes, seed: int, count: int) -> list[bytes]:
    """Cut off at some places, and with some bits flipped."""
    dice = np.random.default_rng(seed)
    cuts = [data[:place] for place in dice.integers(0, len(data), count)]
    flips = []
    for place, bit in zip(dice.integers(0, len(data), count), dice.integers(0, 8, count), strict=True):
        flipped = bytearray(data)
        flipped[place] ^= 1 << bit
        flips.append(bytes(flipped))
    return cuts + flips


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_damaged_folder_of_torch_is_one_error_or_means_the_same_shapes(tmp_path: Path, name: str) -> None:
    """Nothing has checksums there: what is read may be wrong, but nothing else than a CheckpointError is raised."""
    dcp.save({"w": torch.ones(2), "n": {"step": 3}}, checkpoint_id=tmp_path / "dcp")
    file = tmp_path / "dcp" / name
    num_refused = 0
    for data in damaged(file.read_bytes(), 1, 120):
        file.write_bytes(data)
        try:
            load_dcp({"w": torch.zeros(2), "n": {"step": 0}}, tmp_path / "dcp")
        except CheckpointError:
            num_refused += 1
    assert num_refused > 120


# torch.save


def test_files_of_torch_save_are_loaded(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    torch.save({"model": model.state_dict(), **nested(3), "numbers": {1: "x"}, "size": torch.Size([2])}, tmp_path / "x")
    state = {**nested(1), "numbers": Value({}), "size": ()}
    own = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    torch.save({"model": model.state_dict()}, tmp_path / "model.pt")
    load_torch(state, tmp_path / "x")
    assert as_bytes(state["model"]) == as_bytes(nested(3)["model"])
    assert (state["ratios"], state["numbers"].value, state["size"]) == (nested(3)["ratios"], {1: "x"}, (2,))
    load_torch({"model": own}, tmp_path / "model.pt")
    assert as_bytes(own.state_dict()) == as_bytes(model.state_dict())


def test_a_conjugated_view_is_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2, dtype=torch.complex64).conj()}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="conjugated"):
        load_torch({"x": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "x.pt")


@pytest.mark.parametrize("saved", [[1, 2], torch.ones(2)])
def test_what_is_no_dict_is_refused(tmp_path: Path, saved: Any) -> None:
    torch.save(saved, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="holds no dict"):
        load_torch({}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="is not there"):
        load_torch({}, tmp_path / "y.pt")


def test_old_files_of_torch_save_are_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"is no whole file of torch\.save.*Save it again"):
        load_torch({"x": torch.zeros(2)}, tmp_path / "x.pt")


# all of them


class CountingStorage(LocalStorage):
    def __init__(self) -> None:
        self.num_bytes = 0

    def open_file(self, path: Path) -> Any:
        return _Counting(self, super().open_file(path))


class _Counting:
    def __init__(self, storage: CountingStorage, opened: Any) -> None:
        self._storage, self._opened = storage, opened

    def __enter__(self) -> Self:
        self._file: ReadableFile = self._opened.__enter__()
        self.num_bytes = self._file.num_bytes
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.__exit__(*exception)

    def read_at(self, offset: int, buffer: memoryview) -> int:
        self._storage.num_bytes += len(buffer)
        return self._file.read_at(offset, buffer)


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    saved = {"small": torch.ones(1000), "large": torch.ones(1 << 20)}
    safetensors.torch.save_file(saved, tmp_path / "x.safetensors")
    dcp.save(saved, checkpoint_id=tmp_path / "dcp")
    torch.save(saved, tmp_path / "x.pt")
    for call, path in ((load_safetensors, "x.safetensors"), (load_dcp, "dcp"), (load_torch, "x.pt")):
        storage, state = CountingStorage(), {"small": torch.zeros(1000)}
        call(state, tmp_path / path, storage=storage, allow=["unexpected"])
        assert state["small"].tolist() == [1] * 1000
        assert storage.num_bytes < 40_000, call


def test_a_save_of_ours_is_not_taken_for_another_format(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="one of our own"):
        load_safetensors({"w": torch.zeros(2)}, tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"has no \.metadata"):
        load_dcp({"w": torch.zeros(2)}, tmp_path / "ours")
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        load({"w": torch.zeros(2)}, tmp_path)


# saving and converting


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, r"'a.b' are both 'a\.b' there|'a.b' and 'a.b' are both"),
        ({"own": PerRank(1)}, "'own' is"),
        ({"x": np.ones(2)}, "a ndarray has no place|'x' is no tensor"),
    ],
)
def test_what_has_no_place_there_is_refused(tmp_path: Path, state: dict[str, Any], said: str) -> None:
    for call in (save_dcp, save_safetensors):
        with pytest.raises(CheckpointError, match=said):
            call(state, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    for call in (save_dcp, save_safetensors):
        with pytest.raises(CheckpointError, match="is there already"):
            call({"w": torch.ones(2)}, tmp_path)


def test_every_format_becomes_every_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tensors(3)
    save(state, tmp_path / "0")
    chain = ["dcp", "disttrain", "safetensors", "dcp", "safetensors", "disttrain"]
    for number, form in enumerate(chain, 1):
        assert main(["convert", str(tmp_path / f"{number - 1}"), str(tmp_path / f"{number}"), "--to", form]) == 0
        assert main(["diff", "--values", str(tmp_path / "0"), str(tmp_path / f"{number}")]) == 0
        assert main(["ls", str(tmp_path / f"{number}")]) == 0
    assert main(["verify", str(tmp_path / f"{len(chain)}")]) == 0
    assert as_bytes(load_full(tmp_path / f"{len(chain)}")) == as_bytes(state)
    assert "GB/s" in capsys.readouterr().out


def test_values_and_tied_tensors_are_converted(tmp_path: Path) -> None:
    tied = torch.ones(3)
    torch.save({"a": tied, "b": tied, "step": 4}, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "ours", "disttrain")
    full = load_full(tmp_path / "ours")
    assert (full["a"] is full["b"], full["a"].tolist(), full["step"]) == (True, [1] * 3, 4)
    with pytest.raises(CheckpointError, match="there is no format 'zip'"):
        convert(tmp_path / "x.pt", tmp_path / "y", "zip")  # type: ignore[arg-type]


def test_large_tensors_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("dcp_writing", "safetensors_writing"):
        monkeypatch.setattr(f"disttrain.checkpoint.interop.{module}._PART_BYTES", 64)
    monkeypatch.setattr("disttrain.checkpoint.interop.dcp_writing._FILE_BYTES", 256)
    state = {"w": torch.arange(math.prod((7, 5, 3))).view(7, 5, 3), "v": torch.arange(40)}
    save_dcp(state, tmp_path / "dcp")
    save_safetensors(state, tmp_path / "hf")
    for load_it, path in ((dcp.load, "dcp"), (load_dcp, "dcp"), (load_safetensors, "hf")):
        loaded = {"w": torch.zeros(7, 5, 3, dtype=torch.int64), "v": torch.zeros(40, dtype=torch.int64)}
        load_it(loaded, **({"checkpoint_id": tmp_path / path} if load_it is dcp.load else {"path": tmp_path / path}))
        assert as_bytes(loaded) == as_bytes(state)
