"""Copies of saves in the memory of nodes: a job that starts again needs no disk, and never loads what is not whole.

Each rank is a node here, with a folder of its own for its memory.
"""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain import barrier, get_rank, get_world_size, init_device_mesh
from disttrain.checkpoint import Checkpointer, LocalStorage, PeerMemory, PerRank
from disttrain.dtensor import Shard, distribute_tensor
from disttrain.errors import CheckpointError
from disttrain.testing import RankPool
from disttrain.testing.pool import RankError
from tests.multirank.faulty_storage import NEVER, FaultyStorage
from tests.multirank.gated_storage import GatedStorage
from tests.multirank.lockless_storage import TakenOver

LIMIT_S = 240.0


def state_of(step: int) -> dict[str, Any]:
    """Everything is `step`; sharded, replicated, plain and per rank."""
    mesh = init_device_mesh("cpu", (get_world_size(),))
    weight = distribute_tensor(torch.full((8, 1200), float(step)), mesh, [Shard(0)], src_data_rank=None)
    return {"w": weight, "plain": torch.full((5000,), step), "step": step, "own": PerRank(step)}


def checkpointer_of(root: str, num_ranks: list[int] | None = None, **options: Any) -> Checkpointer:
    """`num_ranks`: on each node; default: one."""
    nodes = [node for node, num in enumerate(num_ranks or [1] * get_world_size()) for _ in range(num)]
    node = nodes[get_rank()]
    return Checkpointer(f"{root}/disk", peer_memory=PeerMemory(f"{root}/node-{node}", nodes.count(node)), **options)


def save_steps(root: str, steps: list[int], num_ranks: list[int] | None = None) -> None:
    with checkpointer_of(root, num_ranks) as checkpointer:
        for step in steps:
            pending = checkpointer.async_save(step, state_of(step))
            pending.result(LIMIT_S)
            assert pending.memory_problem == ""


def load_newest(root: str, num_ranks: list[int] | None = None) -> list[Any]:
    """The step, after a look at every element, and what was said about copies."""
    state = state_of(-1)
    checkpointer = checkpointer_of(root, num_ranks)
    latest = checkpointer.latest()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step = checkpointer.load(state)
    assert state["w"].to_local().eq(step).all()
    assert state["plain"].eq(step).all()
    assert (state["step"], state["own"].value) == (step, step)
    assert latest is not None
    assert latest >= step
    return [step, [str(warning.message) for warning in said if warning.category is RuntimeWarning]]


def files_named(root: Path, name: str, step: int) -> list[Path]:
    return sorted(root.glob(f"node-*/*/step-{step:08d}.*/{name}"))


def test_any_one_node_may_be_lost(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(3, save_steps, {"root": str(tmp_path), "steps": [1, 2, 3]})
    assert len(files_named(tmp_path, "rank-00001.safetensors", 3)) == 2
    shutil.rmtree(tmp_path / "disk")
    for lost in range(3):
        node, elsewhere = tmp_path / f"node-{lost}", tmp_path / "lost"
        node.rename(elsewhere)
        assert rank_pool.run(3, load_newest, {"root": str(tmp_path)}) == [[3, []]] * 3
        shutil.rmtree(node, ignore_errors=True)  # which the load may have made again
        elsewhere.rename(node)


@pytest.mark.parametrize("num_ranks", [[2, 1], [1, 2], [1, 1, 1]])
def test_nodes_of_different_sizes(rank_pool: RankPool, tmp_path: Path, num_ranks: list[int]) -> None:
    rank_pool.run(3, save_steps, {"root": str(tmp_path), "steps": [1, 2], "num_ranks": num_ranks})
    shutil.rmtree(tmp_path / "disk")
    shutil.rmtree(tmp_path / "node-0")
    assert rank_pool.run(3, load_newest, {"root": str(tmp_path), "num_ranks": num_ranks}) == [[2, []]] * 3


def test_one_node_needs_no_other(rank_pool: RankPool, tmp_path: Path) -> None:
    """Its memory outlives the processes; another number of ranks loads it."""
    rank_pool.run(2, save_steps, {"root": str(tmp_path), "steps": [1, 2], "num_ranks": [2]})
    shutil.rmtree(tmp_path / "disk")
    assert rank_pool.run(3, load_newest, {"root": str(tmp_path), "num_ranks": [3]}) == [[2, []]] * 3


def test_two_nodes_lost_are_too_many(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(3, save_steps, {"root": str(tmp_path), "steps": [1, 2]})
    for node in (1, 2):
        shutil.rmtree(tmp_path / f"node-{node}")
    (tmp_path / "disk" / "step-00000002").rename(tmp_path / "disk" / "elsewhere")
    assert rank_pool.run(3, load_newest, {"root": str(tmp_path)}) == [[1, []]] * 3


def test_two_saves_are_kept_at_most(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(2, save_steps, {"root": str(tmp_path), "steps": list(range(1, 6))})
    names = {path.name.partition(".")[0] for path in tmp_path.glob("node-*/*/step-*")}
    assert names == {"step-00000004", "step-00000005"}


@pytest.mark.parametrize("num_damaged", [1, 2])
@pytest.mark.parametrize("file", ["rank-00001.safetensors", "manifest.json"])
def test_a_flipped_bit_leads_to_the_other_copy_and_then_to_the_disk(
    rank_pool: RankPool, tmp_path: Path, file: str, num_damaged: int
) -> None:
    rank_pool.run(2, save_steps, {"root": str(tmp_path), "steps": [1]})
    for path in files_named(tmp_path, file, 1)[-num_damaged:]:
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)
    if num_damaged == 1:
        shutil.rmtree(tmp_path / "disk")
    for step, said in rank_pool.run(2, load_newest, {"root": str(tmp_path)}):
        assert step == 1
        assert all("a copy in memory was of no use" in sentence for sentence in said)
        assert all("does not have the bytes" in sentence for sentence in said)
        # A manifest that is damaged is none: nobody begins with it. Both copies may be found out at once.
        assert len(said) in ([0] if file == "manifest.json" else range(1, num_damaged + 1))


def test_of_a_step_that_is_saved_again_the_later_save_counts(rank_pool: RankPool, tmp_path: Path) -> None:
    """Whichever has the larger ID: the saves on the disk are taken away, as by somebody who goes back."""
    arguments = {"root": str(tmp_path)}
    for _ in range(2):
        rank_pool.run(2, save_steps, {**arguments, "steps": [1, 3]})
        shutil.rmtree(tmp_path / "disk")
        rank_pool.run(2, save_steps, {**arguments, "steps": [2]})
        shutil.rmtree(tmp_path / "disk")
        assert rank_pool.run(2, load_newest, {"root": str(tmp_path)}) == [[2, []]] * 2


def lose_the_directory(root: str) -> list[str]:
    checkpointer = checkpointer_of(root, storage=TakenOver())
    checkpointer.save(1, state_of(1))
    try:
        checkpointer.save(2, state_of(2))
    except CheckpointError as error:
        return [error.problem]
    return []


def test_a_job_that_has_lost_its_directory_keeps_no_copies(rank_pool: RankPool, tmp_path: Path) -> None:
    for (problem,) in rank_pool.run(2, lose_the_directory, {"root": str(tmp_path)}):
        assert problem == f"another job has taken over {tmp_path / 'disk'}."
    assert files_named(tmp_path, "manifest.json", 2) == []
    assert rank_pool.run(2, load_newest, {"root": str(tmp_path)}) == [[1, []]] * 2


def test_a_torn_copy_is_none(rank_pool: RankPool, tmp_path: Path) -> None:
    """One torn copy: the other is taken; both: the save before."""
    rank_pool.run(2, save_steps, {"root": str(tmp_path), "steps": [1, 2]})
    shutil.rmtree(tmp_path / "disk")
    first, second = files_named(tmp_path, "rank-00001.safetensors", 2)
    os.truncate(first, first.stat().st_size - 1)
    assert rank_pool.run(2, load_newest, {"root": str(tmp_path)}) == [[2, []]] * 2
    os.truncate(second, 0)
    assert rank_pool.run(2, load_newest, {"root": str(tmp_path)}) == [[1, []]] * 2


def save_without_memory_on_one(root: str) -> list[str]:
    checkpointer = checkpointer_of(root)
    checkpointer.save(1, state_of(1))
    with pytest.warns(RuntimeWarning, match="step-00000001 is saved, but not with all its copies in memory") as said:
        checkpointer.close()
    return [str(warning.message) for warning in said]


def test_a_node_without_room_costs_copies_and_no_save(rank_pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "node-1").touch()
    found = rank_pool.run(2, save_without_memory_on_one, {"root": str(tmp_path)})
    assert found[0] == found[1]
    assert "on rank 0: OSError: NotADirectoryError" in found[0][0] or "on rank 1: NotADirectoryError" in found[0][0]
    assert rank_pool.run(2, load_newest, {"root": str(tmp_path)}) == [[1, []]] * 2
    shutil.rmtree(tmp_path / "disk")
    assert rank_pool.run(2, load_newest, {"root": str(tmp_path)}) == [[1, []]] * 2


def fail_to_save(root: str, step: int, victim: int, fails_at: int, how: str) -> list[str]:
    storage = LocalStorage()
    if get_rank() == victim:
        storage = FaultyStorage(fails_at, how)
        storage.undo()  # it is the writer that shall suffer
    checkpointer = checkpointer_of(root, storage=storage)
    try:
        checkpointer.save(step, state_of(step))
    except CheckpointError as error:
        return [error.problem]
    checkpointer.close()
    return []


@pytest.mark.sweep(0)
@pytest.mark.timeout(900)  # it starts ranks anew as often as a save has operations
@pytest.mark.parametrize("victim", [0, 1])
def test_a_writer_killed_at_each_operation_leaves_a_whole_save(
    rank_pool: RankPool, tmp_path: Path, victim: int
) -> None:
    rank_pool.run(2, save_steps, {"root": str(tmp_path), "steps": [1]})
    step, outcomes = 1, []
    for fails_at in range(NEVER):
        old, step = step, step + 1
        how = {"victim": victim, "fails_at": fails_at, "how": "kill"}
        arguments = {"root": str(tmp_path), "step": step, **how}
        found = rank_pool.run(2, fail_to_save, arguments)
        assert found[0] == found[1]
        loaded = rank_pool.run(2, load_newest, {"root": str(tmp_path)})
        assert loaded[0] == loaded[1]
        assert loaded[0][1] == []
        if not found[0]:
            break
        outcomes.append(loaded[0][0] == step)
        assert loaded[0][0] in {old, step}
        step = loaded[0][0]
    assert False in outcomes
    assert True in outcomes  # from memory, before the disk has it


def test_what_was_loaded_stays_though_nobody_knew_it_whole(rank_pool: RankPool, tmp_path: Path) -> None:
    """The writers died as soon as all files were there; training goes on from them, and loses its next save too."""
    rank_pool.run(2, save_steps, {"root": str(tmp_path), "steps": [1, 2]})
    for mark in files_named(tmp_path, "kept", 2):
        mark.unlink()
    shutil.rmtree(tmp_path / "disk" / "step-00000002")
    assert rank_pool.run(2, load_newest, {"root": str(tmp_path)}) == [[2, []]] * 2
    arguments = {"root": str(tmp_path), "step": 3, "victim": 0, "fails_at": 0, "how": "kill"}
    assert all(rank_pool.run(2, fail_to_save, arguments))
    assert rank_pool.run(2, load_newest, {"root": str(tmp_path)}) == [[2, []]] * 2


def save_until_killed(root: str) -> None:
    """All processes are lost while the second save is on its way to the disk."""
    storage = GatedStorage(f"{root}/gate")
    checkpointer = checkpointer_of(root, storage=storage)
    checkpointer.save(1, state_of(1))
    with storage.shut() if get_rank() == 0 else nullcontext():
        barrier()
        pending = checkpointer.async_save(2, state_of(2))
        folder = Path(f"{root}/node-{get_rank()}")
        while not list(folder.glob("*/step-00000002.*/kept")):
            assert not pending.wait(0.01)
        barrier()
        assert checkpointer.writer_pid is not None
        os.kill(checkpointer.writer_pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def test_killed_processes_load_what_the_disk_does_not_have(rank_pool: RankPool, tmp_path: Path) -> None:
    with RankPool(beside=rank_pool) as pool:
        with pytest.raises(RankError):
            pool.run(3, save_until_killed, {"root": str(tmp_path)})
        shutil.rmtree(tmp_path / "node-1")
        assert [path.name for path in tmp_path.glob("disk/step-*[0-9]") if "tmp" not in path.name] == ["step-00000001"]
        assert pool.run(3, load_newest, {"root": str(tmp_path)}) == [[2, []]] * 3
        # What goes on from there keeps copies on all nodes again.
        pool.run(3, save_steps, {"root": str(tmp_path), "steps": [3]})
        shutil.rmtree(tmp_path / "disk")
        shutil.rmtree(tmp_path / "node-0")
        assert pool.run(3, load_newest, {"root": str(tmp_path)}) == [[3, []]] * 3


def fail_then_save(root: str) -> list[Any]:
    """A save of a step that is there, and what is with the next one; the state changes on one rank in between."""
    checkpointer = checkpointer_of(root)
    checkpointer.save(1, state_of(1))
    sentences = []
    try:
        checkpointer.save(1, state_of(1))
    except CheckpointError as error:
        sentences.append(error.problem)
    checkpointer.save(2, state_of(2))
    checkpointer.save(3, {**state_of(3), **({"more": torch.ones(3)} if get_rank() else {})})
    checkpointer.close()
    return [sentences, checkpointer.latest()]


def test_a_save_that_waits_fails_once_and_plans_each_time(rank_pool: RankPool, tmp_path: Path) -> None:
    found = rank_pool.run(2, fail_then_save, {"root": str(tmp_path)})
    assert found[0] == found[1]
    assert found[0][1] == 3
    (sentence,) = found[0][0]
    assert "step-00000001 is there already" in sentence
