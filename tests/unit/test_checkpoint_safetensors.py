"""safetensors folders: what the package and Hugging Face's libraries write is read, and the other way round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from disttrain.checkpoint.interop import load_safetensors, save_safetensors
from disttrain.errors import CheckpointError
from tests.cases.checkpoints import as_bytes, tensors


def test_what_safetensors_saved_is_loaded(tmp_path: Path) -> None:
    saved = {name: tensor.contiguous() for name, tensor in tensors(3).items()}
    safetensors.torch.save_file(saved, tmp_path / "x.safetensors")
    for path in (tmp_path, tmp_path / "x.safetensors"):
        state = tensors(1)
        assert not load_safetensors(state, path)
        assert as_bytes(state) == as_bytes(saved)


@pytest.mark.parametrize("max_file_bytes", [100, 1 << 30])
def test_safetensors_load_what_is_saved_for_them(tmp_path: Path, max_file_bytes: int) -> None:
    state = {**tensors(3), "tied": tensors(3)["rows"]}
    state["rows"] = state["tied"]
    save_safetensors({"model": state}, tmp_path / "hf", max_file_bytes=max_file_bytes)
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    loaded: dict[str, torch.Tensor] = {}
    for name in files:
        with safetensors.safe_open(tmp_path / "hf" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            loaded |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  it is no dict
    first = {f"model.{name}": tensor for name, tensor in state.items() if name != "tied"}
    assert as_bytes(loaded) == as_bytes(first)
    if max_file_bytes > 100:
        assert files == ["model.safetensors"]
    else:
        assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == first.keys()
        assert index["metadata"]["total_size"] == sum(map(len, as_bytes(first).values()))
    own = {**tensors(1), "tied": tensors(1)["rows"]}
    own["rows"] = own["tied"]
    assert not load_safetensors({"model": own}, tmp_path / "hf")
    assert as_bytes(own) == as_bytes(state)


def test_a_damaged_header_is_one_error(tmp_path: Path) -> None:
    """Cut off at every byte, and each bit flipped."""
    file = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"w": torch.ones(2), "n": torch.ones(1, dtype=torch.int8)}, file)
    data = file.read_bytes()
    header_bytes = 8 + int.from_bytes(data[:8], "little")

    def outcome() -> str:
        try:
            load_safetensors({"w": torch.zeros(2), "n": torch.zeros(1, dtype=torch.int8)}, file)
        except CheckpointError:
            return "refused"
        return "loaded"

    for end in range(len(data)):
        file.write_bytes(data[:end])
        assert outcome() == "refused", end
    for bit in range(8 * header_bytes):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        outcome()


@pytest.mark.parametrize(
    "header",
    [
        b"[]", b"{", b"{\"w\": 1}", b'{"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 7]}}',
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}',
        b'{"w": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}}',
        b'{"w": {"dtype": "F32", "shape": [true, 2], "data_offsets": [0, 8]}}',
        b'{"w": {"dtype": "F32", "shape": "22", "data_offsets": [0, 8]}}',
        b'{"w": {"dtype": "F32", "shape": [0, 4611686018427387904], "data_offsets": [0, 0]}}',
        b'{"w": {"dtype": "F32", "shape": [0, "\\ud800"], "data_offsets": [0, 0]}}',
        b'{"\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=r"x\.safetensors is no safetensors file"):
        load_safetensors({"w": torch.zeros(2)}, file)


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"weight_map": {"w": "../x"}}', '{"weight_map": {"w": 1}}', '{"weight_map": []}']
)
def test_an_index_that_lies_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="is no index"):
        load_safetensors({}, tmp_path)


def test_what_an_index_lists_must_be_there(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}')
    with pytest.raises(CheckpointError, match="lists 'v', which is not there"):
        load_safetensors({}, tmp_path)
    index.write_text('{"weight_map": {"w": "b.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"b\.safetensors is missing"):
        load_safetensors({}, tmp_path)
