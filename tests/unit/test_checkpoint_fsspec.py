"""Saves where there is no rename and no lock: a save is there from the moment that it has its manifest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from disttrain.checkpoint import Checkpointer, load, load_full, save
from disttrain.checkpoint.format.manifest import MANIFEST
from disttrain.checkpoint.fsspec_storage import FsspecStorage
from disttrain.checkpoint.storage.base import LocalStorage, locate
from disttrain.errors import CheckpointError


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((300,), value), "step": int(value)}


def test_what_is_saved_by_url_is_loaded_by_url(memory: Any) -> None:
    save(state(3.0), "memory://runs/a")
    loaded = state(0.0)
    load(loaded, "memory://runs/a")
    assert (loaded["w"].tolist(), loaded["step"]) == ([3.0] * 300, 3)
    assert load_full("memory://runs/a")["step"] == 3
    assert sorted(memory.find("/runs")) == ["/runs/a/manifest.json", "/runs/a/rank-00000.safetensors"]


def test_a_checkpointer_keeps_the_newest(memory: Any) -> None:
    checkpointer = Checkpointer("memory://runs/lm", keep=2)
    for step in (1, 2, 3):
        checkpointer.save(step, state(step))
    loaded = state(0)
    assert (checkpointer.latest(), checkpointer.load(loaded, 2), loaded["w"][0]) == (3, 2, 2)
    checkpointer.close()
    assert {Path(name).parent.name for name in memory.find("/runs")} == {"step-00000002", "step-00000003"}
    with pytest.raises(CheckpointError, match="there already"):
        checkpointer.save(3, state(4))
    checkpointer.load(loaded)
    assert loaded["w"][0] == 3


class Dying(OSError):
    pass


@pytest.mark.parametrize("dies_at", range(1, 9))
def test_whatever_dies_leaves_the_old_state_or_the_new(
    memory: Any, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    """At each change of the storage in turn; whatever is cleaned up afterwards dies as well."""
    checkpointer = Checkpointer("memory://runs", keep=1)
    checkpointer.save(1, state(1))
    num_changes = 0

    def counted(change: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_changes
            num_changes += 1
            if num_changes >= dies_at:
                raise Dying
            return change(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("cp_file", "rm", "rm_file", "makedirs"):
            patch.setattr(memory, name, counted(getattr(memory, name)))
        try:
            checkpointer.save(2, state(2))
        except CheckpointError:
            pass
    assert num_changes >= dies_at or dies_at > 6
    loaded = state(0)
    step = checkpointer.load(loaded)
    assert loaded["w"].tolist() == [float(step)] * 300
    if step == 1:
        checkpointer.save(2, state(2))
    assert checkpointer.load(loaded) == 2
    assert loaded["w"].tolist() == [2.0] * 300


def test_a_folder_is_there_when_it_has_its_manifest(memory: Any) -> None:
    storage = FsspecStorage(memory)
    memory.pipe_file("/runs/step-00000001/rank-00000.safetensors", b"x")
    assert storage.names(Path("/runs")) == []
    memory.pipe_file(f"/runs/step-00000001/{MANIFEST}", b"x")
    assert storage.names(Path("/runs")) == ["step-00000001"]
    assert storage.names(Path("/nowhere")) == []


def test_urls_and_paths_are_told_apart(memory: Any, tmp_path: Path) -> None:
    assert [type(locate(path)[0]) for path in ("memory://a", tmp_path, str(tmp_path))] == [
        FsspecStorage,
        LocalStorage,
        LocalStorage,
    ]
    with pytest.raises(CheckpointError, match=r"nosuch://x cannot be reached.*Install disttrain\[fsspec\]"):
        locate("nosuch://x")
