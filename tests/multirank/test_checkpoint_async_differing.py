"""Plain tensors that differ among ranks, in saves that are written while training goes on."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from disttrain import barrier, get_rank
from disttrain.checkpoint import Checkpointer, async_save, load_full
from disttrain.testing import RankPool

LIMIT_S = 240.0


def save_at_once(directory: str) -> list[str]:
    own = torch.eye(3)[get_rank()]
    state = {"w": torch.ones(2), "mean": own, "var": own + 1, **({"x": own.clone()} if get_rank() else {})}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async_save(state, f"{directory}/save").result(LIMIT_S)
        async_save(state, f"{directory}/again").result(LIMIT_S)
    return [str(warning.message) for warning in caught]


def test_tensors_that_differ_are_named_and_one_ranks_are_kept(rank_pool: RankPool, tmp_path: Path) -> None:
    for world_size in (2, 3):
        folder = tmp_path / str(world_size)
        told = rank_pool.run(world_size, save_at_once, {"directory": str(folder)})
        names = "'mean', 'var'" if world_size == 2 else "'mean', 'var', 'x'"
        assert len(told[0]) == 1
        assert f"keeps those of the first rank that has them: {names}. " in told[0][0]
        assert not any(told[1:])
        found = load_full(folder / "again")
        assert found["mean"].tolist() == [1, 0, 0]
        assert found["var"].tolist() == [2, 1, 1]
        assert found["x"].tolist() == [0, 1, 0]


def come_to_differ(directory: str) -> list[str]:
    state = {name: torch.zeros(4) for name in "axy"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Checkpointer(directory, keep=None) as checkpointer:
            for step in range(4):
                checkpointer.async_save(step, state).result(LIMIT_S)
                barrier()
                state["x" if step else "y"].add_(get_rank())
                state["a"].add_(1)
    return [str(warning.message).split(". ")[0].partition("keeps ")[2] for warning in caught]


def test_tensors_that_come_to_differ_are_told_of_and_planned_for(rank_pool: RankPool, tmp_path: Path) -> None:
    of_each, of_first = "some rank's of each part", "those of the first rank that has them"
    told = rank_pool.run(2, come_to_differ, {"directory": str(tmp_path)})
    # A save that finds one is told of at the next save, which is planned anew.
    assert told == [[f"{of_first}: 'x', 'y'", f"{of_each}: 'y'"], []]
    found = load_full(tmp_path / "step-00000003")
    assert found["x"].tolist() == [0] * 4
    assert found["y"].tolist() == [0] * 4
    assert found["a"].tolist() == [3] * 4
