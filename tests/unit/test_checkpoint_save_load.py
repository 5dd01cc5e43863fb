"""Saving and loading in one process: what comes back, what is on the disk, and what is refused."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any, Self

import pytest
import safetensors
import torch
import xxhash

from disttrain.checkpoint import PerRank, Value, load, save
from disttrain.checkpoint.format.manifest import BLOCK_BYTES
from disttrain.errors import CheckpointCorruptError, CheckpointError

DTYPES = [
    torch.bfloat16,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.uint16,
]
SHAPES = [(), (0,), (3, 0), (1,), (5, 3), (2, 3, 4)]


def tensors(seed: int) -> dict[str, Any]:
    """One of each dtype and shape, of random bits."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Any] = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            num_bytes = math.prod(shape) * dtype.itemsize
            raw = torch.randint(0, 2 if dtype == torch.bool else 256, (num_bytes,), generator=generator)
            state[f"{dtype}{list(shape)}"] = raw.to(torch.uint8).view(dtype).view(shape)
    return state


def as_bytes(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}


def test_tensors_of_every_kind_come_back(tmp_path: Path) -> None:
    saved, loaded = tensors(1), tensors(2)
    same_objects = dict(loaded)
    save(saved, tmp_path / "save")
    load(loaded, tmp_path / "save")
    assert as_bytes(loaded) == as_bytes(saved)
    assert all(loaded[name] is same_objects[name] for name in loaded)


def test_values_of_every_kind_come_back(tmp_path: Path) -> None:
    values = {
        "none": None,
        "flag": True,
        "count": -(1 << 40),
        "ratio": 0.1,
        "text": "ä/~",
        "raw": b"\x00\xff",
        "list": [1, [2.5, "x"], torch.arange(3)],
        "tuple": (1, (2, 3)),
        "numbers": {1: "one", 2: "two"},
        "dtype": torch.bfloat16,
        "deep/er": {"~": {"x": 1}, "~1": 2, "": 3},
        "open": Value({"any": {"keys": 1}}),
        "own": PerRank({"seed": 7}),
    }
    blank = {
        **dict.fromkeys(values),
        "deep/er": {"~": {"x": 0}, "~1": 0, "": 0},
        "open": Value({}),
        "own": PerRank(None),
    }
    save(values, tmp_path / "save")
    load(blank, tmp_path / "save")
    assert blank["list"].pop().tolist() == values["list"].pop().tolist() == [0, 1, 2]
    assert blank == values


def test_views_and_strides_come_back(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    saved = {
        "transposed": base.T,
        "columns": base[:, 1::2],
        "expanded": base[:1].expand(3, 6),
        "conj": (base + 1j).conj(),
    }
    target = torch.zeros(6, 4)
    loaded = {
        "transposed": target.T.contiguous().T,
        "columns": torch.zeros(4, 6)[:, ::2],
        "expanded": torch.zeros(3, 6),
        "conj": torch.zeros(4, 6, dtype=torch.complex64),
    }
    save(saved, tmp_path / "save")
    load(loaded, tmp_path / "save")
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        name: tensor.tolist() for name, tensor in saved.items()
    }


def test_parameters_are_loaded_without_their_history(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    save({"w": torch.full((3,), 2.0)}, tmp_path / "save")
    load({"w": weight}, tmp_path / "save")
    assert weight.tolist() == [2, 2, 2]
    assert weight.is_leaf
    assert weight.requires_grad


def test_a_load_is_a_write_to_all_who_look(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    save({"parameter": parameter}, tmp_path / "save")
    kept = parameter * parameter
    load({"parameter": parameter}, tmp_path / "save")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_a_tied_tensor_is_there_once(tmp_path: Path) -> None:
    weight = torch.arange(1000.0)
    save({"a": weight, "b": weight}, tmp_path / "save")
    assert (tmp_path / "save" / "rank-00000.safetensors").stat().st_size == 4096 + 4000
    loaded = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    load(loaded, tmp_path / "save")
    assert loaded["a"].equal(weight)
    assert loaded["b"].equal(weight)


def test_safetensors_reads_the_file(tmp_path: Path) -> None:
    """All but tensors without elements, which need no place in it."""
    every = tensors(1)
    saved = {name: tensor for name, tensor in every.items() if tensor.numel()}
    save({**every, "value": 3}, tmp_path / "save")
    with safetensors.safe_open(tmp_path / "save" / "rank-00000.safetensors", "pt") as file:
        assert file.metadata()["format"] == "disttrain-checkpoint"
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found.pop("value").numpy().tobytes() == b"\x03"
    assert as_bytes(found) == as_bytes(saved)
    for name, tensor in saved.items():
        if tensor.dtype == torch.complex128:  # which safetensors has no name for
            assert found[name].dtype == torch.uint8
        else:
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)


def test_data_are_aligned(tmp_path: Path) -> None:
    save(tensors(1), tmp_path / "save")
    content = json.loads((tmp_path / "save" / "manifest.json").read_text())["content"]
    assert content["files"]["rank-00000.safetensors"]["header_bytes"] % 4096 == 0
    for name, tensor in content["tensors"].items():
        item_size = getattr(torch, tensor["dtype"]).itemsize
        assert all(chunk["offset"] % item_size == 0 for chunk in tensor["chunks"]), name


def test_a_save_is_never_overwritten(tmp_path: Path) -> None:
    save({"x": Value(1)}, tmp_path / "save")
    with pytest.raises(CheckpointError, match=r"save: .*/save is there already\. Save to a new place"):
        save({"x": Value(2)}, tmp_path / "save")
    loaded = {"x": 0}
    load(loaded, tmp_path / "save")
    assert loaded == {"x": 1}
    assert sorted(os.listdir(tmp_path)) == ["save"]


def test_one_error_names_all_that_does_not_fit(tmp_path: Path) -> None:
    save({"a": torch.ones(3), "b": {"c": 1, "d": torch.ones(2)}, "e": 1}, tmp_path / "save")
    state = {"a": torch.zeros(4), "b": {"d": torch.zeros(2, dtype=torch.int64)}, "e": torch.zeros(1), "new": 0}
    with pytest.raises(CheckpointError) as raised:
        load(state, tmp_path / "save")
    assert str(raised.value) == (
        f"load: {tmp_path / 'save'} does not fit: the save lacks new; the state lacks b/c; "
        "a is float32[3] there, float32[4] here; b/d is float32[2] there, int64[2] here; "
        "e is a value there, a tensor here. Build the state as it was when it was saved, or say what may differ: "
        "allow=, rename=, convert=."
    )
    assert state["a"].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("missing", ["nothing", "manifest.json", "folder"])
def test_a_folder_that_is_no_save(tmp_path: Path, missing: str) -> None:
    folder = tmp_path / "save"
    if missing != "folder":
        folder.mkdir()
    if missing == "manifest.json":
        (folder / "notes.txt").write_text("hello")
    sentence = "has no manifest.json" if missing == "manifest.json" else "is not there, or is empty"
    with pytest.raises(CheckpointError, match=f"load: {folder} {sentence}: no save was finished there"):
        load({"x": 1}, folder)


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ([1], "the state is a list, not a dict"),
        ({"x": object()}, "a value cannot travel: object is neither"),
        ({"w": torch.ones(2, device="meta")}, "tensor 'w' is on the meta device"),
        ({"w": torch.ones(2, 2).to_sparse()}, r"tensor 'w' is torch\.sparse_coo"),
        ({"o": torch.optim.SGD([torch.ones(1)])}, "'o' is an optimizer, whose own state names parameters by number"),
        ({"__metadata__": 1}, "the name '__metadata__' is safetensors' own"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, state: Any, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=f"save: .*{sentence}"):
        save(state, tmp_path / "save")
    assert os.listdir(tmp_path) == []


def damaged(path: Path, bit: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


def test_flipped_bits_are_found(tmp_path: Path) -> None:
    saved = {"w": torch.arange(300.0), "b": torch.arange(9, dtype=torch.uint8), "v": "a value"}
    save(saved, tmp_path / "save")
    path = tmp_path / "save" / "rank-00000.safetensors"
    num_bits = 8 * path.stat().st_size
    dice = random.Random(0)
    for bit in [0, num_bits - 1, *(dice.randrange(num_bits) for _ in range(60))]:
        damaged(path, bit)
        state = {"w": torch.zeros(300), "b": torch.zeros(9, dtype=torch.uint8), "v": ""}
        with pytest.raises(
            CheckpointCorruptError, match=r"load: .*/rank-00000\.safetensors does not have the bytes of"
        ):
            load(state, tmp_path / "save")
        damaged(path, bit)


def test_an_error_names_tensor_and_offset_of_a_flip(tmp_path: Path) -> None:
    weight = torch.zeros(3 * BLOCK_BYTES, dtype=torch.uint8)
    save({"w": weight}, tmp_path / "save")
    damaged(tmp_path / "save" / "rank-00000.safetensors", 8 * (4096 + BLOCK_BYTES + 5))
    with pytest.raises(
        CheckpointCorruptError, match=f"of 'w' .* in the {BLOCK_BYTES} bytes from offset {4096 + BLOCK_BYTES} on"
    ):
        load({"w": weight}, tmp_path / "save")


@pytest.mark.parametrize(("num_bytes", "sentence"), [(100, "has 100 bytes, 4144 were saved"), (None, "is missing")])
def test_a_cut_or_missing_file_is_found(tmp_path: Path, num_bytes: int | None, sentence: str) -> None:
    save({"w": torch.zeros(12)}, tmp_path / "save")
    path = tmp_path / "save" / "rank-00000.safetensors"
    if num_bytes is None:
        path.unlink()
    else:
        os.truncate(path, num_bytes)
    with pytest.raises(CheckpointCorruptError, match=sentence):
        load({"w": torch.zeros(12)}, tmp_path / "save")


def test_a_file_of_another_save_is_found(tmp_path: Path) -> None:
    for number in (1, 2):
        save({"w": torch.full((12,), float(number))}, tmp_path / f"save{number}")
    (tmp_path / "save1" / "rank-00000.safetensors").rename(tmp_path / "save2" / "rank-00000.safetensors")
    with pytest.raises(CheckpointCorruptError):
        load({"w": torch.zeros(12)}, tmp_path / "save2")


def test_bytes_that_are_not_a_value_any_more_are_corrupt(tmp_path: Path) -> None:
    """Even under a right checksum."""
    save({"v": Value(1)}, tmp_path / "save")
    folder = tmp_path / "save"
    raw = bytearray((folder / "rank-00000.safetensors").read_bytes())
    raw[-1] = 0xC1  # msgpack never uses it
    (folder / "rank-00000.safetensors").write_bytes(raw)
    content = json.loads((folder / "manifest.json").read_text())["content"]
    content["values"]["v"]["checksums"] = xxhash.xxh3_64_hexdigest(b"\xc1")
    compact = json.dumps(content, sort_keys=True, separators=(",", ":"))
    checksum = xxhash.xxh3_64_hexdigest(compact.encode())
    (folder / "manifest.json").write_text(json.dumps({"checksum": checksum, "content": content}))
    with pytest.raises(
        CheckpointError, match=r"the value 'v' of .*/rank-00000\.safetensors cannot be unpacked: 1 bytes"
    ):
        load({"v": 0}, folder)


def test_writes_may_be_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dripping:
        """A raw file that takes 1000 bytes at a time."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: memoryview) -> int:
            return int(self.file.write(data[:1000]))

        def fileno(self) -> int:
            return int(self.file.fileno())

    opened = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, *modes, **options: Dripping(opened(path, *modes, **options)))
        save({"w": torch.arange(5000.0)}, tmp_path / "save")
    loaded = {"w": torch.zeros(5000)}
    load(loaded, tmp_path / "save")
    assert loaded["w"].equal(torch.arange(5000.0))
