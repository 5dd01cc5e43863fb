"""Manifests with a right checksum that somebody changed at random: what is loaded is right, or there is our error."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import os
import re
import tempfile
import zlib
from pathlib import Path
from typing import Any

import msgpack
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain import get_rank, init_device_mesh
from disttrain.checkpoint import PerRank, load, load_full, save
from disttrain.checkpoint.cli import main
from disttrain.checkpoint.format.manifest import TABLES
from disttrain.dtensor import Shard, distribute_tensor
from disttrain.errors import CheckpointCorruptError, CheckpointError
from disttrain.testing import run_threads

RAW = re.compile(r"\b[A-Z]\w*(Error|Exception)\b|Traceback")
ODD: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 7, 8, 4096, 4097, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 10**30, -(10**30), 0.0,
    1.5, float("nan"), float("inf"), "", "x", "..", "/", "a/b", "\0", "\ud800", "float32", "float", "int64",
    "nothing", "manifest.json", "rank-00001.safetensors", "00", "0" * 16, [], {}, [0], [1], [-1], [5, 3], [1 << 40],
    [0, 1 << 62], [1] * 70, [[]], [None], {"0": {}}, {"x": "w"},
]  # fmt: skip


def state_of(number: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.arange(15.0).view(5, 3) * number, mesh, [Shard(0)], src_data_rank=None)
    plain = torch.arange(4) * number
    return {
        "w": rows,
        "deep": {"plain": plain, "tied": plain},
        "scalar": torch.tensor(2.5 * number),
        "none": torch.zeros(0, 3),
        "step": 3 * number,
        "empty": {},
        "own": PerRank(number * (1 + get_rank())),
    }


def plain_state() -> dict[str, Any]:
    plain = torch.zeros(4, dtype=torch.int64)
    return {
        "w": torch.zeros(5, 3),
        "deep": {"plain": plain, "tied": plain},
        "scalar": torch.tensor(0.0),
        "none": torch.zeros(0, 3),
        "step": 0,
        "empty": {},
        "own": PerRank(0),
    }


def readable(state: dict[str, Any]) -> str:
    """All but whose value per rank it is, of those that are left."""
    return str({key: state[key] for key in sorted(state) if key != "own"})


@functools.cache
def saved() -> tuple[tempfile.TemporaryDirectory[str], Path, dict[str, Any], str]:
    """A save of two ranks, what its manifest says, and what is in it."""
    held = tempfile.TemporaryDirectory()
    folder = Path(held.name) / "save"
    run_threads(2, lambda: save(state_of(1), folder))
    content = json.loads((folder / "manifest.json").read_bytes())["content"]
    return held, folder, content, readable(load_full(folder))


def changed(data: st.DataObject, content: Any) -> Any:
    """Something somewhere in it is another value, is gone, is there twice, or is a little more or less."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else []
        for key in keys:
            places.append((node, key))
            walk(node[key])

    walk(content)
    node, key = data.draw(st.sampled_from(places), label="place")
    way = data.draw(st.sampled_from(["replace", "remove", "repeat", "add", "rename"]), label="way")
    if way == "remove":
        del node[key]
    elif way == "repeat" and isinstance(node, list):
        node.append(copy.deepcopy(node[key]))
    elif way == "add" and type(node[key]) is int:
        node[key] += data.draw(st.sampled_from([-8, -4, -1, 1, 4, 8, 4096, 1 << 40]), label="more")
    elif way == "rename" and isinstance(node, dict):
        node[data.draw(st.sampled_from(["w", "deep", "deep/plain", "w/x", "", "\ud800", "0"]), label="name")] = (
            node.pop(key)
        )
    else:
        node[key] = copy.deepcopy(data.draw(st.sampled_from(ODD), label="value"))
    return content


def write_manifest(folder: Path, content: Any) -> None:
    compact = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    checksum = xxhash.xxh3_64_hexdigest(compact).encode()
    (folder / "manifest.json").write_bytes(b'{"checksum":"%s","content":%s}\n' % (checksum, compact))


def commanded(*words: str) -> int:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(words)
    said.getvalue().encode()
    assert not RAW.search(said.getvalue()), said.getvalue()
    return code


def clear(error: CheckpointError) -> None:
    text = str(error)
    assert not RAW.search(text), text
    assert len(text) < 2000
    assert "\n" not in text


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_changed_manifest_is_loaded_right_or_refused(data: st.DataObject) -> None:
    _, whole, content, expected = saved()
    content = copy.deepcopy(content)
    for _ in range(data.draw(st.integers(1, 3), label="changes")):
        content = changed(data, content)
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "save"
        folder.mkdir()
        for file in (*whole.glob("rank-*"), whole / TABLES):
            os.link(file, folder / file.name)
        write_manifest(folder, content)
        check_use(folder, whole, expected)


def check_use(folder: Path, whole: Path, expected: str) -> None:
    """All ways to read a save say what was saved, or why not."""
    state = plain_state()
    try:
        load(state, folder)
        assert readable(state) == expected
    except CheckpointError as error:
        clear(error)
    is_whole = commanded("verify", str(folder)) == 0
    try:
        load_full(folder)
    except CheckpointError as error:
        clear(error)
        is_damaged = isinstance(error, CheckpointCorruptError)
    else:
        is_damaged = False
    assert not (is_whole and is_damaged)
    for command in (["ls"], ["ls", "--json"], ["diff", "--values", str(whole)]):
        assert commanded(*command, str(folder)) in (0, 1, 2)
    for form in ("dcp", "safetensors"):
        target = str(folder.with_name(form))
        assert commanded("convert", str(folder), target, "--to", form, "--without", "own") in (0, 1, 2)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_changed_table_is_loaded_right_or_refused(data: st.DataObject) -> None:
    """Under right checksums."""
    _, whole, content, expected = saved()
    content = copy.deepcopy(content)
    packed = (whole / TABLES).read_bytes()
    rows = {name: file["table"] for name, file in content["files"].items()}
    tables = {}
    for name, (offset, num_bytes, _) in rows.items():
        tables[name] = msgpack.unpackb(zlib.decompress(packed[offset : offset + num_bytes]))
    for _ in range(data.draw(st.integers(1, 2), label="changes")):
        tables = changed(data, tables)
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "save"
        folder.mkdir()
        for file in whole.glob("rank-*"):
            os.link(file, folder / file.name)
        written = b""
        for name, file in content["files"].items():
            try:
                table = zlib.compress(msgpack.packb(tables.get(name)))
            except (OverflowError, ValueError):  # what msgpack cannot have
                continue
            file["table"] = [len(written), len(table), xxhash.xxh3_64_hexdigest(table)]
            written += table
        (folder / TABLES).write_bytes(written)
        write_manifest(folder, content)
        check_use(folder, whole, expected)
