"""A save over a save: the old one or the new one, and nothing else is lost."""

from __future__ import annotations

import errno
from pathlib import Path

import fsspec
import pytest
import torch

from disttrain.checkpoint import LocalStorage, load, save
from disttrain.checkpoint.fsspec_storage import FsspecStorage
from disttrain.checkpoint.storage.base import Storage
from disttrain.checkpoint.storage.exchanging import exchange
from disttrain.checkpoint.storage.folders import remove_leftovers
from disttrain.errors import CheckpointError


class Renaming(LocalStorage):
    """Folders cannot change places."""

    def exchange(self, one: Path, other: Path) -> bool:
        return False


def saved(path: Path, value: float, storage: Storage | None = None) -> None:
    save({"w": torch.full((3,), value)}, path, storage=storage, overwrite=True)


def loaded(path: Path, storage: Storage | None = None) -> float:
    state = {"w": torch.zeros(3)}
    load(state, path, storage=storage)
    return state["w"].mean().item()


@pytest.mark.parametrize("kind", ["exchange", "rename", "memory"])
def test_the_new_save_takes_the_place_of_the_old(tmp_path: Path, kind: str) -> None:
    system = fsspec.filesystem("memory")
    storage: Storage = {"exchange": LocalStorage, "rename": Renaming}.get(kind, lambda: FsspecStorage(system))()
    folder = tmp_path if kind != "memory" else Path("/replacing")
    for value in (1.0, 2.0, 3.0):
        saved(folder / "best", value, storage)
        assert loaded(folder / "best", storage) == value
    assert storage.names(folder) == ["best"]
    if kind == "memory":
        system.rm("/replacing", recursive=True)


def test_what_is_no_save_stays(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    saved(folder, 1.0)  # an empty folder gives way
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"mine has 'config.json', which is no save's: it would be lost"):
        saved(folder, 2.0)
    assert loaded(folder) == 1.0
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="file is a file"):
        saved(tmp_path / "file", 1.0)
    with pytest.raises(CheckpointError, match="overwrite=True"):
        save({"w": torch.ones(1)}, folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]


def test_a_save_that_fails_puts_the_old_one_back(tmp_path: Path) -> None:
    storage = Renaming()
    saved(tmp_path / "best", 1.0, storage)
    real_move = storage.move

    def move(source: Path, target: Path) -> None:
        if ".tmp-" in source.name:
            raise OSError(errno.EIO, "It fails")
        real_move(source, target)

    storage.move = move  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="It fails"):
        saved(tmp_path / "best", 2.0, storage)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert loaded(tmp_path / "best") == 1.0


def test_a_save_that_has_died_between_two_names_is_found_and_put_back(tmp_path: Path) -> None:
    saved(tmp_path / "best", 1.0)
    aside = tmp_path / f"best.was-{'0' * 32}"
    (tmp_path / "best").rename(aside)
    assert loaded(tmp_path / "best") == 1.0
    remove_leftovers(LocalStorage(), tmp_path, lambda name: name == "best")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    saved(aside, 2.0)  # one that was left when the new one had its name already
    remove_leftovers(LocalStorage(), tmp_path, lambda name: name == "best")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert loaded(tmp_path / "best") == 1.0


def test_folders_change_places_in_one_step(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    assert exchange(tmp_path / "one", tmp_path / "other")
    assert [(tmp_path / name / "file").read_text() for name in ("one", "other")] == ["other", "one"]
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "one", tmp_path / "not there")
