"""Two jobs, each of two ranks, that save to one directory: one of them hears of it, on all its ranks, and no save of
the other is touched."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain.checkpoint import Checkpointer, LocalStorage
from disttrain.checkpoint.storage.folders import CLAIM
from disttrain.errors import CheckpointError
from disttrain.testing import RankPool
from tests.multirank.lockless_storage import LocklessStorage

LIMIT_S = 240.0


@pytest.fixture(scope="module")
def other_pool(rank_pool: RankPool) -> Iterator[RankPool]:
    with RankPool(beside=rank_pool) as pool:
        yield pool


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((3000,), float(step)), "step": step}


def save(checkpointer: Checkpointer, step: int, is_async: bool) -> str:
    """What it raises, if anything."""
    try:
        if is_async:
            checkpointer.async_save(step, state_of(step)).result(LIMIT_S)
        else:
            checkpointer.save(step, state_of(step))
    except CheckpointError as error:
        return error.problem
    return ""


def save_around(directory: str, is_async: bool, has_locks: bool) -> list[str]:
    """Save steps 1 and 3, and wait between for somebody to make a file named `go`."""
    checkpointer = Checkpointer(directory, storage=LocalStorage() if has_locks else LocklessStorage())
    outcomes = [save(checkpointer, 1, is_async)]
    Path(directory, f"began-{os.getpid()}").touch()
    while not Path(directory, "go").exists():
        time.sleep(0.01)
    outcomes.append(save(checkpointer, 3, is_async))
    close(checkpointer)
    return outcomes


def close(checkpointer: Checkpointer) -> None:
    try:
        checkpointer.close()
    except CheckpointError:  # heard already
        pass


def save_one(directory: str, step: int, is_async: bool, has_locks: bool) -> str:
    checkpointer = Checkpointer(directory, storage=LocalStorage() if has_locks else LocklessStorage())
    outcome = save(checkpointer, step, is_async)
    close(checkpointer)
    return outcome


def steps_in(directory: Path) -> list[int]:
    found = sorted(path for path in directory.glob("step-*"))
    assert all(".tmp" not in path.name for path in found)
    for path in found:
        state = state_of(-1)
        step = Checkpointer(directory).load(state, int(path.name[5:]))
        assert state["w"].eq(step).all()
    return [int(path.name[5:]) for path in found]


def both(
    pools: tuple[RankPool, RankPool], directory: Path, *, is_async: bool, has_locks: bool
) -> tuple[list[list[str]], list[str]]:
    """What the first job's two saves end with, by rank, and what that of the second between them."""
    arguments = {"directory": str(directory), "is_async": is_async, "has_locks": has_locks}
    with ThreadPoolExecutor(1) as beside:
        first = beside.submit(pools[0].run, 2, save_around, arguments)
        try:
            while len(list(directory.glob("began-*"))) < 2:
                assert not first.done()
                time.sleep(0.01)
            second = pools[1].run(2, save_one, {**arguments, "step": 2})
        finally:
            (directory / "go").touch()
        return first.result(LIMIT_S), second


@pytest.mark.parametrize("is_async", [False, True])
def test_the_later_job_is_refused(rank_pool: RankPool, other_pool: RankPool, tmp_path: Path, is_async: bool) -> None:
    first, second = both((rank_pool, other_pool), tmp_path, is_async=is_async, has_locks=True)
    assert first == [["", ""]] * 2
    assert second[0] == second[1]
    assert second[0].startswith("another job (process ")
    assert second[0].endswith(f" saves to {tmp_path} as well.")
    assert steps_in(tmp_path) == [1, 3]
    # It has gone: another one may.
    arguments = {"directory": str(tmp_path), "step": 4, "is_async": is_async, "has_locks": True}
    assert other_pool.run(2, save_one, arguments) == [""] * 2
    assert steps_in(tmp_path) == [3, 4]
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


@pytest.mark.parametrize("is_async", [False, True])
def test_without_locks_the_later_job_takes_over(
    rank_pool: RankPool, other_pool: RankPool, tmp_path: Path, is_async: bool
) -> None:
    first, second = both((rank_pool, other_pool), tmp_path, is_async=is_async, has_locks=False)
    assert second == [""] * 2
    assert first[0] == first[1]
    assert first[0][0] == ""
    assert first[0][1].endswith(f"has taken over {tmp_path}.")
    assert steps_in(tmp_path) == [1, 2]


def test_a_dead_job_leaves_nothing_that_refuses(rank_pool: RankPool, tmp_path: Path) -> None:
    dying = RankPool(beside=rank_pool)
    arguments = {"directory": str(tmp_path), "is_async": False, "has_locks": True}
    with ThreadPoolExecutor(1) as beside:
        first = beside.submit(dying.run, 2, save_around, arguments)
        while len(list(tmp_path.glob("began-*"))) < 2:
            assert not first.done()
            time.sleep(0.01)
        dying.close()  # kills
        assert first.exception(LIMIT_S) is not None
    assert len([name for name in os.listdir(tmp_path) if CLAIM.fullmatch(name)]) == 1
    assert rank_pool.run(2, save_one, {**arguments, "step": 2}) == [""] * 2
    assert [name for name in os.listdir(tmp_path) if CLAIM.fullmatch(name)] == []
