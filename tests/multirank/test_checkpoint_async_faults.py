"""Whatever fails while a save is written beside training: the old state or the new one is there, whole, and every rank
hears of it in the same words."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain import get_rank, get_world_size, init_device_mesh
from disttrain.checkpoint import Checkpointer, LocalStorage, PerRank
from disttrain.dtensor import Shard, distribute_tensor
from disttrain.errors import CheckpointError
from disttrain.testing import RankPool
from tests.multirank.faulty_storage import NEVER, FaultyStorage

LIMIT_S = 240.0
SHAPE = (8, 40_001)
"""Of what is sharded: each rank's part is large enough to be written past the page cache, but for its end."""


def state_of(step: int) -> dict[str, Any]:
    """Everything is `step`; sharded, replicated, plain and per rank."""
    mesh = init_device_mesh("cpu", (get_world_size(),))
    weight = distribute_tensor(torch.full(SHAPE, float(step)), mesh, [Shard(0)], src_data_rank=None)
    return {"w": weight, "plain": torch.full((5000,), step), "step": step, "own": PerRank(step)}


def loaded_step(directory: Path) -> int:
    """The step in the latest save, after a look at every element of it; in one process."""
    state = {"w": torch.zeros(SHAPE), "plain": torch.zeros(5000, dtype=torch.int64), "step": 0, "own": PerRank(0)}
    step = Checkpointer(directory).load(state)
    assert state["w"].eq(step).all()
    assert state["plain"].eq(step).all()
    assert (state["step"], state["own"].value) == (step, step)
    return step


def save_first(directory: str) -> None:
    Checkpointer(directory).save(1, state_of(1))


def save_badly(directory: str, step: int, victim: int, fails_at: int, how: str) -> list[str]:
    """What the save ends with, and what the next call and `close` raise; nothing where nothing failed."""
    storage = LocalStorage()
    if get_rank() == victim:
        storage = FaultyStorage(fails_at, how)
        storage.undo()  # it is the writer that shall suffer
    checkpointer = Checkpointer(directory, keep=1, storage=storage)
    pending = checkpointer.async_save(step, state_of(step))
    assert pending.wait(LIMIT_S)
    error = pending.committed.exception()
    if error is None:
        checkpointer.close()
        return []
    assert isinstance(error, CheckpointError)
    with pytest.raises(CheckpointError) as raised:
        checkpointer.async_save(step + 1, state_of(step + 1))
    assert error.problem in raised.value.problem
    checkpointer.close()
    return [error.problem, raised.value.problem]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("how", ["ENOSPC", "kill"])
@pytest.mark.parametrize("victim", [0, 1])
def test_each_operation_of_a_writer_in_turn(rank_pool: RankPool, tmp_path: Path, victim: int, how: str) -> None:
    rank_pool.run(2, save_first, {"directory": str(tmp_path)})
    step, outcomes = 1, []
    for fails_at in range(NEVER):
        old, step = loaded_step(tmp_path), step + 1
        arguments = {"directory": str(tmp_path), "step": step, "victim": victim, "fails_at": fails_at, "how": how}
        found = rank_pool.run(2, save_badly, arguments)
        assert found[0] == found[1]
        if not found[0]:
            break
        sentence = found[0][0]
        assert how == "ENOSPC" or "was ended by SIGKILL" in sentence
        assert how == "kill" or "No space left" in sentence
        assert f"rank {victim}" in sentence or victim == 0
        assert loaded_step(tmp_path) in {old, step}
        outcomes.append(loaded_step(tmp_path) == step)
    assert loaded_step(tmp_path) == step
    assert sorted(os.listdir(tmp_path)) == [f"step-{step:08d}"]
    assert outcomes.count(False) >= 3
    assert victim or any(outcomes)  # after the rename it is there, whatever fails then


def test_short_writes_are_continued(rank_pool: RankPool, tmp_path: Path) -> None:
    arguments = {"directory": str(tmp_path), "step": 7, "victim": 0, "fails_at": 0, "how": "short"}
    assert rank_pool.run(2, save_badly, arguments) == [[], []]
    assert loaded_step(tmp_path) == 7


def save_after_the_writer_died(directory: str) -> list[Any]:
    checkpointer = Checkpointer(directory)
    checkpointer.async_save(1, state_of(1)).result(LIMIT_S)
    if get_rank() == 1:
        assert checkpointer.writer_pid is not None
        os.kill(checkpointer.writer_pid, signal.SIGKILL)
    second = checkpointer.async_save(2, state_of(2))
    assert second.wait(LIMIT_S)
    sentences = [str(second.committed.exception())]
    with pytest.raises(CheckpointError) as raised:
        checkpointer.async_save(3, state_of(3))
    sentences.append(str(raised.value))
    checkpointer.async_save(4, state_of(4))
    checkpointer.close()
    return [sentences, checkpointer.latest()]


def test_an_idle_writer_that_dies_fails_the_next_save_and_no_more(rank_pool: RankPool, tmp_path: Path) -> None:
    found = rank_pool.run(2, save_after_the_writer_died, {"directory": str(tmp_path)})
    assert [latest for _, latest in found] == [4, 4]
    for rank, (sentences, _) in enumerate(found):
        assert all("on rank 1: the writer process" in sentence for sentence in sentences)
        assert all(sentence.endswith(f"[rank {rank}]") for sentence in sentences)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000004"]


def test_two_jobs_save_to_one_place(rank_pool: RankPool, tmp_path: Path) -> None:
    """The second finds the first one's save: it says so on every rank, and the first one's stays."""
    rank_pool.run(2, save_first, {"directory": str(tmp_path)})
    arguments = {"directory": str(tmp_path), "step": 1, "victim": 0, "fails_at": NEVER, "how": "EIO"}
    found = rank_pool.run(2, save_badly, arguments)
    assert found[0] == found[1]
    assert "step-00000001 is there already" in found[0][0]
    assert loaded_step(tmp_path) == 1


def save_where_nobody_may(directory: str) -> str:
    checkpointer = Checkpointer(directory)
    with pytest.raises(CheckpointError) as raised:
        checkpointer.async_save(1, state_of(1))
    return str(raised.value).partition(" [rank")[0]


def test_a_place_that_cannot_be_written_to(rank_pool: RankPool, tmp_path: Path) -> None:
    """A file stands where the folder should be: also who may do everything cannot write there."""
    (tmp_path / "runs").touch()
    found = rank_pool.run(2, save_where_nobody_may, {"directory": str(tmp_path / "runs")})
    assert found[0] == found[1]
    assert "FileExistsError" in found[0]
