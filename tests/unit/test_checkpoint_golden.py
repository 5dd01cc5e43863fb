"""A save of each version of the format, made by two ranks and kept: they must stay readable for ever.

`python tests/unit/test_checkpoint_golden.py FOLDER` made them, and makes another one like them when there is a new
version.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import xxhash

from disttrain import get_rank, init_device_mesh
from disttrain.checkpoint import PerRank, Value, load, load_full, save
from disttrain.checkpoint.cli import main
from disttrain.checkpoint.format.encoding import encode
from disttrain.checkpoint.format.reading import decode
from disttrain.dtensor import Replicate, Shard, distribute_tensor
from disttrain.dtensor.spec.placement import Placement
from disttrain.errors import CheckpointError
from disttrain.testing import run_threads

FOLDER = Path(__file__).parents[1] / "golden"
DTYPES = [torch.bfloat16, torch.bool, torch.complex128, torch.float8_e4m3fn, torch.float32, torch.int64, torch.uint16]


def whole(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(15).view(5, 3).remainder(2 if dtype == torch.bool else 16).to(dtype)


def values() -> dict[str, Any]:
    return {
        "a/b": {"~": "text", "": b"\x00\xff"},
        "numbers": [1, -2.5, None, True, 1 << 60],
        "tuple": (1, (2, "x")),
        "open": Value({1: "one", "two": torch.tensor([1.5, 2.5])}),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "dtype": torch.bfloat16,
    }


@pytest.fixture(params=[1, 2], ids=["version 1", "version 2"])
def golden(request: pytest.FixtureRequest) -> Path:
    folder = FOLDER / f"checkpoint-v{request.param}"
    assert json.loads((folder / "manifest.json").read_bytes())["content"]["version"] == request.param
    return folder


def make(folder: Path) -> None:
    def on_each_rank() -> None:
        mesh = init_device_mesh("cpu", (2,))

        def lying(dtype: torch.dtype, placement: Placement) -> torch.Tensor:
            return distribute_tensor(whole(dtype), mesh, [placement], src_data_rank=None)

        tied = torch.full((4,), 7.0)
        state = {
            "rows": {str(dtype): lying(dtype, Shard(0)) for dtype in DTYPES},
            "columns": lying(torch.float32, Shard(1)),
            "replicated": lying(torch.float32, Replicate()),
            "scalar": torch.tensor(1.25),
            "none": torch.empty(0, 3),
            "tied": {"first": tied, "second": tied},
            "own": PerRank([get_rank(), "x"]),
            **values(),
        }
        save(state, folder)

    run_threads(2, on_each_rank)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_it_is_loaded_whole(golden: Path) -> None:
    state = load_full(golden)
    assert {name: raw(tensor) for name, tensor in state["rows"].items()} == {
        str(dtype): raw(whole(dtype)) for dtype in DTYPES
    }
    for name in ("columns", "replicated"):
        assert state[name].tolist() == whole(torch.float32).tolist()
    assert (state["scalar"].item(), state["none"].shape) == (1.25, (0, 3))
    assert state["tied"]["first"] is state["tied"]["second"]
    assert state["tied"]["first"].tolist() == [7] * 4
    assert state["own"] == PerRank([0, "x"], 0)
    expected = values()
    assert {name: state[name] for name in ("a/b", "numbers", "tuple", "dtype")} == {
        name: expected[name] for name in ("a/b", "numbers", "tuple", "dtype")
    }
    assert state["array"].tolist() == expected["array"].tolist()
    assert (state["open"][1], state["open"]["two"].tolist()) == ("one", [1.5, 2.5])


def test_it_is_loaded_by_other_ranks(golden: Path) -> None:
    def on_each_rank() -> None:
        mesh = init_device_mesh("cpu", (3,))
        weight = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)], src_data_rank=None)
        own = {"columns": weight, "own": PerRank(None)}
        load(own, golden, allow=["unexpected"])
        assert weight.full_tensor().tolist() == whole(torch.float32).tolist()
        assert own["own"] == PerRank([get_rank() % 2, "x"], get_rank() % 2)

    run_threads(3, on_each_rank)


def test_its_bytes_are_verified(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(golden)]) == 0
    assert "whole" in capsys.readouterr().out


def test_the_safetensors_package_reads_its_files(golden: Path) -> None:
    with safetensors.safe_open(golden / "rank-00001.safetensors", "pt") as file:
        assert file.metadata()["format"] == "disttrain-checkpoint"
        assert file.get_tensor("rows/torch.float32@3,0").tolist() == whole(torch.float32)[3:].tolist()


def test_its_manifest_is_written_as_it_was(golden: Path) -> None:
    data = (golden / "manifest.json").read_bytes()
    assert encode(decode(data, "manifest")) == data


def test_a_damaged_manifest_is_one_error(golden: Path) -> None:
    """Cut off at every byte, and a bit flipped in each."""
    data = (golden / "manifest.json").read_bytes()
    manifest = decode(data, "m")
    num_meaningless = 0
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        try:
            assert decode(bytes(flipped), "m") == manifest
            num_meaningless += 1
        except CheckpointError:
            pass
    for end in range(len(data) - 1):
        with pytest.raises(CheckpointError):
            decode(data[:end], "m")
    assert num_meaningless < 10  # the newline at the end may be another white space


def places_in(node: Any) -> list[tuple[Any, Any]]:
    """Every entry of a JSON value, as the container and the key."""
    entries = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    return [(node, key) for key, _ in entries] + [place for _, inner in entries for place in places_in(inner)]


@pytest.mark.parametrize(
    "lie", [None, True, -1, 1 << 70, float("inf"), 0.5, "", "../x", "\ud800", [], {}, [None], {"": 0}]
)
def test_a_manifest_that_lies_under_a_right_checksum_is_one_error(golden: Path, lie: Any) -> None:
    """Each entry in turn: it is refused, or makes a manifest that can be written again."""
    content = json.loads((golden / "manifest.json").read_bytes())["content"]
    num_refused = 0
    for container, key in places_in(content)[::3]:
        was, container[key] = container[key], lie
        compact = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        checksum = xxhash.xxh3_64_hexdigest(compact).encode()
        try:
            encode(decode(b'{"checksum":"%s","content":%s}' % (checksum, compact), "m"))
        except CheckpointError:
            num_refused += 1
        container[key] = was
    assert num_refused > 40


if __name__ == "__main__":
    make(Path(sys.argv[1]))
