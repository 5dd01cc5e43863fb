"""Checkpointer: which saves there are, which stay, and what a failed one leaves."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain.checkpoint import Checkpointer, LocalStorage, Value
from disttrain.errors import CheckpointError


def names_in(directory: Path) -> list[str]:
    """What is there, but for the claim of the Checkpointer that lives."""
    return sorted(name for name in os.listdir(directory) if not name.startswith(".claim-"))


class FullDisk(LocalStorage):
    """Has room for `num_bytes` in each file."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def write_file(self, path: Path, parts: Iterable[memoryview]) -> None:
        def until_full() -> Iterable[memoryview]:
            room = self.num_bytes
            for part in parts:
                yield part[:room]
                room -= len(part)
                if room < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        super().write_file(path, until_full())


@pytest.mark.parametrize("num_bytes", [0, 4100, 5000])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, num_bytes: int) -> None:
    Checkpointer(tmp_path).save(1, {"w": torch.ones(1000)})
    full = Checkpointer(tmp_path, storage=FullDisk(num_bytes))
    with pytest.raises(CheckpointError, match=r"Checkpointer\.save: OSError: .*No space left .* Free some space"):
        full.save(2, {"w": torch.zeros(1000)})
    assert names_in(tmp_path) == ["step-00000001"]
    assert full.latest() == 1


def test_the_newest_saves_are_kept(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "new" / "runs", keep=2)
    assert checkpointer.latest() is None
    for step in (5, 10, 15):
        checkpointer.save(step, {"step": Value(step)})
    checkpointer.close()  # what is old is removed beside what comes next
    assert names_in(checkpointer.directory) == ["step-00000010", "step-00000015"]
    assert checkpointer.latest() == 15
    state = {"step": 0}
    assert checkpointer.load(state, 10) == 10
    assert state == {"step": 10}
    assert checkpointer.load(state) == 15
    assert state == {"step": 15}


@pytest.mark.parametrize("keep", range(1, 8))
def test_as_many_saves_are_kept_as_asked(tmp_path: Path, keep: int) -> None:
    """Also while there are fewer of them."""
    for step in range(1, 9):
        with Checkpointer(tmp_path, keep) as checkpointer:
            checkpointer.save(step, {"step": Value(step)})
        assert names_in(tmp_path) == [f"step-{kept:08d}" for kept in range(max(1, step - keep + 1), step + 1)]


def test_a_save_of_an_older_step_stays(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=1)
    for step in (20, 10):
        checkpointer.save(step, {"step": Value(step)})
    checkpointer.close()
    assert names_in(tmp_path) == ["step-00000010"]


class SlowToRemove(LocalStorage):
    """Removes folders once it may."""

    def __init__(self) -> None:
        self.may_remove = threading.Event()

    def remove_folder(self, path: Path) -> None:
        if not path.name.startswith(".claim-"):
            assert self.may_remove.wait(120)
        super().remove_folder(path)


def test_a_save_does_not_wait_until_old_ones_are_removed(tmp_path: Path) -> None:
    storage = SlowToRemove()
    with Checkpointer(tmp_path, keep=1, storage=storage) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"step": Value(step)})
        assert len(names_in(tmp_path)) == 2
        assert checkpointer.latest() == 2
        storage.may_remove.set()
        checkpointer.save(3, {"step": Value(3)})
    assert names_in(tmp_path) == ["step-00000003"]


def test_all_saves_are_kept_when_asked(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=None)
    for step in range(4):
        checkpointer.save(step, {"step": Value(step)})
    assert len(names_in(tmp_path)) == 4


def test_leftovers_of_dead_saves_go_and_nothing_else(tmp_path: Path) -> None:
    dead, alive = f"step-00000001.tmp-{'a' * 32}", f"step-00000001.tmp-{'b' * 32}"
    for name in (dead, alive, "step-00000003", "mine.tmp-1", f"other.tmp-{'c' * 32}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").touch()
    (tmp_path / f"{dead}.lock").touch()
    (tmp_path / f"step-00000002.tmp-{'d' * 32}.lock").touch()
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.latest() is None
    with LocalStorage().hold(tmp_path / alive):
        checkpointer.save(4, {"x": Value(1)})
        assert names_in(tmp_path) == [
            "mine.tmp-1",
            f"other.tmp-{'c' * 32}",
            alive,
            f"{alive}.lock",
            "step-00000003",
            "step-00000004",
        ]
    assert checkpointer.latest() == 4


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": Value(1)})
    with pytest.raises(CheckpointError, match="step-00000001 is there already"):
        checkpointer.save(1, {"x": Value(2)})


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda folder: Checkpointer(folder).load({}), "there is no save in .*; Save first|there is no save in"),
        (lambda folder: Checkpointer(folder, keep=0), r"keep is 0\. Keep at least 1"),
        (lambda folder: Checkpointer(folder, every=0), r"every is 0\. Save every step"),
        (lambda folder: Checkpointer(folder, when_busy="never"), r"when_busy is 'never'\. It is one of"),
        (lambda folder: Checkpointer(folder).async_save(-1, {}), r"step is -1\. Count steps from 0"),
        (lambda folder: Checkpointer(folder).save(-1, {}), r"step is -1\. Count steps from 0"),
    ],
)
def test_wrong_use(tmp_path: Path, act: Any, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        act(tmp_path)


def test_every_so_manieth_step_is_due(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, every=3)
    assert [step for step in range(8) if checkpointer.is_due(step)] == [3, 6]


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": Value(1)})
    with pytest.raises(CheckpointError, match=r"has no save of step 2\. It has steps \[1\]"):
        checkpointer.load({"x": 0}, 2)


def test_a_load_takes_what_the_function_takes(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"old": torch.arange(3), "more": 1})
    state = {"new": torch.zeros(3), "left": 7}
    with pytest.raises(CheckpointError, match="more"):
        checkpointer.load(state)
    step = checkpointer.load(state, allow=["missing", "unexpected"], rename={"old": "new"}, convert="n*")
    assert (step, state["new"].tolist(), state["left"]) == (1, [0.0, 1.0, 2.0], 7)
    report = checkpointer.report
    assert (report.missing, report.unexpected, report.converted) == (("left",), ("more",), ("new",))


def test_what_the_block_raises_comes_before_what_closing_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untold = CheckpointError("async_save", "the save to x failed: x is there already.")

    def close(_: Checkpointer) -> None:
        raise untold

    monkeypatch.setattr(Checkpointer, "close", close)
    with pytest.raises(CheckpointError, match="the save to x failed"), Checkpointer(tmp_path):
        pass
    with pytest.raises(ValueError, match="ours") as other, Checkpointer(tmp_path):
        raise ValueError("ours")
    assert other.value.__notes__ == [str(untold)]
    with pytest.raises(CheckpointError) as same, Checkpointer(tmp_path):
        raise CheckpointError("async_save", "x is there already.")
    assert not hasattr(same.value, "__notes__")
