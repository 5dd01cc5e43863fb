"""Each write, fsync, rename and mkdir of a synchronous save fails in turn: the old state is there, or the new one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from disttrain.checkpoint import Checkpointer
from disttrain.errors import CheckpointError
from tests.multirank.faulty_storage import NEVER, FaultyStorage


def loaded_step(directory: Path) -> int:
    state = {"w": torch.zeros(3000)}
    step = Checkpointer(directory).load(state)
    assert state["w"].eq(step).all()
    return step


def save_badly(directory: Path, step: int, fails_at: int, how: str) -> CheckpointError | None:
    """What it raises."""
    storage = FaultyStorage(fails_at, how)
    try:
        with Checkpointer(directory, keep=1, storage=storage) as checkpointer:
            checkpointer.save(step, {"w": torch.full((3000,), float(step))})
    except CheckpointError as error:
        return error
    finally:
        storage.undo()
    return None


@pytest.mark.parametrize("how", ["ENOSPC", "EIO", "EROFS"])
def test_each_operation_in_turn(tmp_path: Path, how: str) -> None:
    Checkpointer(tmp_path).save(1, {"w": torch.full((3000,), 1.0)})
    step, is_new = 2, []
    while error := save_badly(tmp_path, step, step - 2, how):
        assert "OSError: [Errno" in str(error) or "could not be removed" in str(error)
        is_new.append(loaded_step(tmp_path) == step)
        step += 1
    assert loaded_step(tmp_path) == step
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{step:08d}"]
    # Old until the rename, new after it.
    assert is_new == sorted(is_new)
    assert is_new.count(False) >= 7
    assert is_new.count(True) >= 1


def test_short_writes_are_continued(tmp_path: Path) -> None:
    storage = FaultyStorage(NEVER, "short")
    try:
        Checkpointer(tmp_path, storage=storage).save(9, {"w": torch.full((3000,), 9.0)})
    finally:
        storage.undo()
    assert loaded_step(tmp_path) == 9
