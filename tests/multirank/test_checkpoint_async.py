"""Saves that are written while training goes on: values, order, what waits for what, and what all ranks do alike."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain import barrier, current_world, get_rank, get_world_size, init_device_mesh
from disttrain.checkpoint import Checkpointer, PerRank, Value, async_save, load
from disttrain.checkpoint.async_saving.session import Session, Turn
from disttrain.dtensor import Shard, distribute_tensor
from disttrain.errors import CheckpointError
from disttrain.store import PrefixStore
from disttrain.testing import RankPool, run_threads
from tests.multirank.gated_storage import GatedStorage

LIMIT_S = 240.0


def state_of(step: int) -> dict[str, Any]:
    """Everything is `step`; sharded, replicated, plain and per rank."""
    mesh = init_device_mesh("cpu", (get_world_size(),))
    weight = distribute_tensor(torch.full((8, 1200), float(step)), mesh, [Shard(0)], src_data_rank=None)
    return {"w": weight, "plain": torch.full((5000,), step), "step": step, "own": PerRank(step)}


def overwrite(state: dict[str, Any]) -> None:
    state["w"].to_local().fill_(-1)
    state["plain"].fill_(-1)


def loaded(checkpointer: Checkpointer, step: int | None = None) -> int:
    """What is in a save, after a look at every element of it."""
    state = state_of(-2)
    checkpointer.load(state, step)
    found = int(state["step"])
    assert state["w"].to_local().eq(found).all()
    assert state["plain"].eq(found).all()
    assert state["own"].value == found
    return found


def save_and_overwrite(directory: str) -> list[Any]:
    with Checkpointer(directory, keep=None) as checkpointer:
        pending = []
        for step in range(1, 6):
            state = state_of(step)
            pending.append(checkpointer.async_save(step, state))
            overwrite(state)
        paths = [save.result(LIMIT_S) for save in pending]
        folder = directory.partition("://")[2] or directory
        assert [str(path) for path in paths] == [f"{folder}/step-0000000{step}" for step in range(1, 6)]
        assert all(save.progress == 1.0 and save.staged.done() and not save.was_dropped for save in pending)
    return [loaded(checkpointer, step) for step in range(1, 6)]


@pytest.mark.parametrize("protocol", ["", "file://", "local://"])
def test_values_are_those_at_the_call(rank_pool: RankPool, tmp_path: Path, protocol: str) -> None:
    """On files, and on what the writers reach through fsspec."""
    assert rank_pool.run(3, save_and_overwrite, {"directory": f"{protocol}{tmp_path}"}) == [[1, 2, 3, 4, 5]] * 3


def save_to_memory() -> str:
    with Checkpointer("memory://runs") as checkpointer, pytest.raises(CheckpointError) as caught:
        checkpointer.async_save(1, {"step": Value(1)})
    return str(caught.value)


def test_what_no_other_process_sees_is_refused(rank_pool: RankPool) -> None:
    for found in rank_pool.run(2, save_to_memory):
        assert "what a MemoryFileSystem holds, no other process sees. Use `save`" in found


def save_thrice(directory: str, when_busy: Any) -> list[Any]:
    """Steps 1 to 4 while nothing can be written; the first one has begun before the others come."""
    storage = GatedStorage(f"{directory}/gate")
    with Checkpointer(directory, keep=None, when_busy=when_busy, storage=storage) as checkpointer:
        if get_rank() == 0:
            gate = storage.shut()
            gate.__enter__()
        barrier()
        pending = [checkpointer.async_save(step, state_of(step)) for step in (1, 2)]
        # Rank 1 sees the others' decision whatever it has seen itself.
        pending += [checkpointer.async_save(step, state_of(step)) for step in (3, 4)]
        dropped = [save.was_dropped for save in pending]
        assert [save.done() for save in pending] == dropped
        barrier()
        if get_rank() == 0:
            gate.__exit__(None, None, None)
        outcomes = [save.result(LIMIT_S) is None for save in pending]
    latest = checkpointer.latest()
    assert latest is not None
    assert loaded(checkpointer) == latest
    return [dropped, outcomes, latest]


def test_saves_are_skipped_while_two_are_under_way(rank_pool: RankPool, tmp_path: Path) -> None:
    found = rank_pool.run(2, save_thrice, {"directory": str(tmp_path), "when_busy": "skip"})
    assert found == [[[False, False, True, True], [False, False, True, True], 2]] * 2


def test_the_newest_save_takes_the_place_of_the_one_that_waits(rank_pool: RankPool, tmp_path: Path) -> None:
    found = rank_pool.run(2, save_thrice, {"directory": str(tmp_path), "when_busy": "newest"})
    assert found == [[[False, True, True, False], [False, True, True, False], 4]] * 2


class Counter:
    """Counts the collectives that it is shown."""

    def __init__(self) -> None:
        self.num_seen = 0

    def __getattr__(self, name: str) -> Any:
        def count(*_args: Any, **_kwargs: Any) -> None:
            self.num_seen += 1

        return count


def counted(call: Callable[..., Any], requests: list[str]) -> Callable[..., Any]:
    def count(*args: Any) -> Any:
        requests.append(call.__name__)
        return call(*args)

    return count


def count_waiting(directory: str) -> list[int]:
    """Collectives, and requests to the store that can wait for others, of each of three saves' calls."""
    world, counter, found = current_world(), Counter(), []
    with Checkpointer(directory) as checkpointer:
        state = state_of(1)
        world.add_observer(counter)
        for step in range(1, 4):
            requests: list[str] = []
            with pytest.MonkeyPatch.context() as patch:
                for name in ("wait", "get", "barrier", "watch"):
                    patch.setattr(world.store, name, counted(getattr(world.store, name), requests))
                pending = checkpointer.async_save(step, state)
            pending.result(LIMIT_S)
            found.append(len(requests))
        world.remove_observer(counter)
    return [counter.num_seen, *found]


def test_only_the_first_save_waits_for_other_ranks(rank_pool: RankPool, tmp_path: Path) -> None:
    for collectives, first, *others in rank_pool.run(2, count_waiting, {"directory": str(tmp_path)}):
        assert collectives == 0
        assert first > 0
        assert others == [0, 0]


def change_on_some_ranks(directory: str, changed: list[int], first: int) -> list[Any]:
    """What goes wrong with a save that rank `first` comes to first, and at the next call; and the last step."""
    store = PrefixStore(directory, current_world().store)
    checkpointer = Checkpointer(directory)
    checkpointer.async_save(1, state_of(1)).result(LIMIT_S)
    extra = {"more": torch.ones(3)} if get_rank() in changed else {}
    with pytest.MonkeyPatch.context() as patch:
        if get_rank() == first:
            real = Session.agreed

            def agreed(session: Session, number: int, own: Turn) -> Turn:
                found = real(session, number, own)
                store.set("begun", b"")
                return found

            patch.setattr(Session, "agreed", agreed)
        else:
            store.wait(["begun"], LIMIT_S)
        pending = checkpointer.async_save(2, {**state_of(2), **extra})
    assert pending.wait(LIMIT_S)
    problems = []
    error = pending.failure()
    if error is not None:
        problems.append(error.problem)
        with pytest.raises(CheckpointError, match="Save once more") as raised:
            checkpointer.async_save(3, state_of(3))
        problems.append(raised.value.problem)
    checkpointer.async_save(4, {**state_of(4), **extra}).result(LIMIT_S)
    checkpointer.close()
    return [problems, checkpointer.latest()]


def test_a_state_that_has_changed_on_the_first_rank_is_planned_anew(rank_pool: RankPool, tmp_path: Path) -> None:
    arguments = {"directory": str(tmp_path), "changed": [1], "first": 1}
    assert rank_pool.run(3, change_on_some_ranks, arguments) == [[[], 4]] * 3


@pytest.mark.parametrize("changed", [[1], [1, 2]])
def test_a_state_that_has_changed_on_others_fails_that_save_alike(
    rank_pool: RankPool, tmp_path: Path, changed: list[int]
) -> None:
    arguments = {"directory": str(tmp_path), "changed": changed, "first": 0}
    others = " Ranks [2] failed too." if 2 in changed else ""
    changes = "what there is to save has changed since the last save, and not so on the rank that came first."
    problem = f"on rank 1: {changes}{others}"
    told = f"the save to {tmp_path / 'step-00000002'} failed: {problem}"
    assert rank_pool.run(3, change_on_some_ranks, arguments) == [[[problem, told], 4]] * 3


def save_by_function(directory: str) -> list[str]:
    state = state_of(3)
    pending = [async_save(state, f"{directory}/{name}") for name in ("a", "b")]
    overwrite(state)
    return [str(save.result(LIMIT_S)) for save in pending]


def test_a_function_does_without_a_checkpointer(rank_pool: RankPool, tmp_path: Path) -> None:
    paths = [f"{tmp_path}/a", f"{tmp_path}/b"]
    assert rank_pool.run(2, save_by_function, {"directory": str(tmp_path)}) == [paths] * 2
    single = {"w": torch.zeros(8, 1200), "plain": torch.zeros(5000, dtype=torch.int64), "step": 0, "own": PerRank(0)}
    for path in paths:
        load(single, path)
        assert single["w"].eq(3).all()
    pending = async_save(single, tmp_path / "alone")
    single["w"].zero_()
    assert pending.result(LIMIT_S) == tmp_path / "alone"
    load(single, tmp_path / "alone")
    assert single["w"].eq(3).all()


TRAINER = """
import sys, torch
from disttrain.checkpoint import Checkpointer
from tests.multirank.gated_storage import GatedStorage
checkpointer = Checkpointer(sys.argv[1], storage=GatedStorage(sys.argv[2]))
pending = checkpointer.async_save(5, {"w": torch.full((1000,), 5.0)})
pending.staged.result()
while checkpointer.writer_pid is None:
    pass
print(checkpointer.writer_pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_a_writer_finishes_what_its_dead_trainer_gave_it(tmp_path: Path, signal_number: int) -> None:
    storage = GatedStorage(str(tmp_path / "gate"))
    with storage.shut():
        command = [sys.executable, "-c", TRAINER, str(tmp_path), storage.gate]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
            assert trainer.stdout is not None
            writer = os.pidfd_open(int(trainer.stdout.readline()))
            storage.wait_until_reached()
            trainer.send_signal(signal_number)
            trainer.wait(LIMIT_S)
    wait_for_end(writer)
    os.close(writer)
    state = {"w": torch.zeros(1000)}
    assert Checkpointer(tmp_path).load(state) == 5
    assert state["w"].eq(5).all()


def wait_for_end(process: int) -> None:
    """Wait for the end of a process, by its descriptor."""
    poll = select.poll()
    poll.register(process)
    assert poll.poll(LIMIT_S * 1e3)


def test_a_store_that_no_other_process_can_use_is_refused(tmp_path: Path) -> None:
    def body() -> str:
        with pytest.raises(CheckpointError) as raised:
            async_save({"x": Value(1)}, tmp_path / "save")
        return raised.value.problem

    for problem in run_threads(2, body):
        assert "no other process can use" in problem


def save_what_differs(directory: str) -> list[str]:
    told = []
    checkpointer = Checkpointer(directory, keep=None)
    checkpointer.async_save(1, state_of(1)).result(LIMIT_S)
    # Those of one plan: nothing but the value tells them apart.
    pending = checkpointer.async_save(2, {**state_of(2), "step": get_rank()})
    assert pending.wait(LIMIT_S)
    told.append(getattr(pending.failure(), "problem", "saved"))
    with pytest.raises(CheckpointError) as raised:
        checkpointer.async_save(3, state_of(3))
    told.append(raised.value.problem)
    # A part of the ranks has a value; its own plan, and its first save.
    extra: dict[str, Any] = {"some": get_rank()} if get_rank() else {"order": 1}
    with pytest.raises(CheckpointError) as raised:
        checkpointer.async_save(4, {**state_of(4), **extra}).result(LIMIT_S)
    told.append(raised.value.problem)
    with pytest.raises(CheckpointError):
        checkpointer.async_save(5, state_of(5))
    order = dict.fromkeys([1, 2] if get_rank() else [2, 1], math.nan)
    checkpointer.async_save(6, {**state_of(6), "order": Value(order)}).result(LIMIT_S)
    checkpointer.close()
    return [*told, str(checkpointer.latest())]


def test_values_that_differ_fail_the_save_on_all_ranks(rank_pool: RankPool, tmp_path: Path) -> None:
    told = rank_pool.run(3, save_what_differs, {"directory": str(tmp_path)})
    assert told[0] == told[1] == told[2]
    problem = "values differ among ranks: 'step' is 0 on rank 0, 1 on rank 1, 2 on rank 2."
    assert told[0][0] == problem
    assert told[0][1].endswith(problem)
    assert told[0][2:] == ["values differ among ranks: 'some' is 1 on rank 1, 2 on rank 2.", "6"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000006"]
