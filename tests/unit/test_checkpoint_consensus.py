"""Agreement, on ranks that are threads: one outcome for all, whoever fails, and nobody waits for ever."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from disttrain import get_rank
from disttrain.checkpoint import LocalStorage, Value, load, save
from disttrain.checkpoint.saving.consensus import Consensus
from disttrain.errors import CheckpointCorruptError, CheckpointError
from disttrain.process_group import current_world
from disttrain.testing import run_threads


def outcome(consensus: Consensus, failing: set[int], error: Exception) -> tuple[type, str, bool]:
    """Which error this rank got, and whether its cause is chained."""

    def work() -> int:
        if consensus.rank in failing:
            raise error
        return consensus.rank

    with pytest.raises(CheckpointError) as raised:
        consensus.agree(work)
    return type(raised.value), str(raised.value), raised.value.__cause__ is not None


def test_all_ranks_get_the_decision() -> None:
    def body() -> list[object]:
        consensus = Consensus("test")
        return [consensus.agree(lambda: consensus.rank * 10, sum), consensus.agree(get_rank, lambda ranks: ranks)]

    assert run_threads(3, body) == [[30, [0, 1, 2]]] * 3


def test_a_failure_is_everybodys() -> None:
    def body() -> tuple[type, str, bool]:
        return outcome(Consensus("save"), {1}, OSError(errno.ENOSPC, "No space left on device", "/d/x"))

    sentence = (
        "save: on rank 1: OSError: [Errno 28] No space left on device: '/d/x'. "
        "Free some space, or save elsewhere; what was there before is as it was. "
    )
    assert run_threads(3, body) == [(CheckpointError, f"{sentence}[rank {rank}]", rank == 1) for rank in range(3)]


def test_several_failures_are_one_error() -> None:
    def body() -> tuple[type, str, bool]:
        return outcome(Consensus("load"), {1, 2}, CheckpointCorruptError("x", "bad bytes.", "Try another."))

    found = run_threads(4, body)
    assert {kind for kind, _, _ in found} == {CheckpointCorruptError}
    assert found[0][1] == "load: on rank 1: bad bytes. Ranks [2] failed too. Try another. [rank 0]"


def test_an_interrupt_is_raised_where_it_came_and_told_to_others() -> None:
    def body() -> str:
        def work() -> None:
            if get_rank() == 1:
                raise KeyboardInterrupt

        with pytest.raises((CheckpointError, KeyboardInterrupt)) as raised:
            Consensus("save").agree(work)
        return f"{type(raised.value).__name__} {raised.value}"

    assert run_threads(2, body) == [
        "CheckpointError save: on rank 1: KeyboardInterrupt: . [rank 0]",
        "KeyboardInterrupt ",
    ]


def test_ranks_save_to_one_place(tmp_path: Path) -> None:
    def body() -> str:
        with pytest.raises(CheckpointError) as raised:
            save({"x": 1}, tmp_path / f"save{get_rank()}")
        return raised.value.problem

    assert run_threads(2, body) == ["ranks save to ['save0', 'save1']."] * 2
    assert os.listdir(tmp_path) == []


def test_a_decision_that_fails_is_everybodys() -> None:
    def body() -> str:
        def decide(_: list[None]) -> None:
            raise CheckpointError("x", "the folder is there.")

        with pytest.raises(CheckpointError) as raised:
            Consensus("save").agree(lambda: None, decide)
        return raised.value.problem

    assert run_threads(3, body) == ["the folder is there."] * 3


def test_nothing_stays_in_the_store() -> None:
    def body() -> int:
        consensus = Consensus("test")
        for _ in range(5):
            consensus.agree(lambda: b"x" * 1000)
        store = current_world().store
        store.barrier("all are done", 3)
        return store.num_keys()

    # A counter per rank, and the last answer.
    assert max(run_threads(3, body)) <= 3 + 1


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTTRAIN_CHECKPOINT_TIMEOUT_S", "0.05")

    def body() -> str:
        if get_rank() == 2:
            return ""
        with pytest.raises(CheckpointError) as raised:
            Consensus("save").agree(lambda: None)
        return raised.value.problem

    assert run_threads(3, body) == ["ranks [2] did not come within 0.05 s."] * 2 + [""]


def test_a_rank_0_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTTRAIN_CHECKPOINT_TIMEOUT_S", "0.02")

    def body() -> str:
        if get_rank() == 0:
            return ""
        with pytest.raises(CheckpointError) as raised:
            Consensus("save").agree(lambda: None)
        return raised.value.problem

    assert run_threads(3, body) == ["", *["rank 0 did not answer within 0.04 s."] * 2]


class FailingOn(LocalStorage):
    """Cannot write the files whose names end so."""

    def __init__(self, ending: str) -> None:
        self.ending = ending

    def write_file(self, path: Path, parts: Iterable[memoryview]) -> None:
        if path.name.endswith(self.ending):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        super().write_file(path, parts)


@pytest.mark.parametrize("ending", ["1.safetensors", "manifest.json"])
def test_a_failed_save_leaves_nothing(tmp_path: Path, ending: str) -> None:
    def body() -> str:
        state = {"a": torch.ones(10), "b": torch.ones(10), "c": torch.ones(10)}
        with pytest.raises(CheckpointError) as raised:
            save(state, tmp_path / "save", storage=FailingOn(ending))
        return raised.value.problem

    found = run_threads(3, body)
    assert len(set(found)) == 1
    assert ending in found[0]
    assert os.listdir(tmp_path) == []


def test_names_that_one_rank_alone_lacks(tmp_path: Path) -> None:
    save({"x": Value(1), "y": Value(2)}, tmp_path / "save")

    def body() -> str:
        state = {"x": 0} if get_rank() else {"x": 0, "y": 0, "z": 0}
        with pytest.raises(CheckpointError) as raised:
            load(state, tmp_path / "save")
        return raised.value.problem

    assert run_threads(2, body) == [f"{tmp_path / 'save'} does not fit: the save lacks z."] * 2


def test_ranks_with_different_parts_of_a_model(tmp_path: Path) -> None:
    """As the stages of a pipeline have; loaded by ranks with other parts."""

    def body(parts: list[list[int]], fill: int) -> dict[str, list[float]]:
        state = {
            "layers": {str(layer): torch.full((3,), float(layer * fill)) for layer in parts[get_rank()]},
            "shared": torch.full((2,), float(7 * fill)),
            "epoch": fill,
        }
        if fill:
            save(state, tmp_path / "save")
        else:
            load(state, tmp_path / "save")
        assert state["epoch"] == 1
        assert state["shared"].tolist() == [7, 7]
        return {name: tensor.tolist() for name, tensor in state["layers"].items()}

    run_threads(2, body, [[1, 2, 3], [4, 5]], 1)
    found = run_threads(3, body, [[1], [2, 3], [4, 5]], 0)
    assert found == [{"1": [1] * 3}, {"2": [2] * 3, "3": [3] * 3}, {"4": [4] * 3, "5": [5] * 3}]
