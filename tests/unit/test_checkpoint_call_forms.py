"""torch.distributed.checkpoint's call forms: what makes sense works, the rest is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain import barrier, get_rank, get_world_size, new_group
from disttrain.checkpoint import Value, load, save
from disttrain.errors import CheckpointError
from disttrain.process_group import current_world
from disttrain.testing import run_threads


def test_a_checkpoint_id_is_a_path(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "save", process_group=None, no_dist=True)
    state = {"w": torch.zeros(2)}
    load(state, checkpoint_id=str(tmp_path / "save"), storage_reader=None, planner=None)
    assert state["w"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("call", "arguments", "said"),
    [
        (save, {}, "save: neither of path and checkpoint_id"),
        (load, {"path": "x", "checkpoint_id": "x"}, "load: both of path and checkpoint_id"),
        (save, {"path": "x", "storage_writer": 1}, r"storage_writer= is torch.*Give storage="),
        (load, {"path": "x", "storage_reader": 1}, r"storage_reader= is torch.*load_dcp reads torch's own"),
        (load, {"path": "x", "planner": 1}, r"planner= is torch.*allow=, rename= and convert="),
        (save, {"path": "x", "process_group": 1}, "process_group= is not the default group"),
    ],
)
def test_what_torch_alone_has_is_refused(call: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        call({"w": torch.ones(2)}, **arguments)


def test_the_default_group_is_every_rank_and_no_dist_is_one(tmp_path: Path) -> None:
    def on_each_rank() -> None:
        state = {"w": torch.ones(2), f"own{get_rank()}": torch.ones(1)}
        save(state, checkpoint_id=tmp_path / "both", process_group=current_world("test").default_group)
        save({"rank": Value(get_rank())}, checkpoint_id=tmp_path / f"alone{get_rank()}", no_dist=True)
        part = new_group([get_rank()])
        with pytest.raises(CheckpointError, match="not the default group"):
            save(state, tmp_path / "part", process_group=part)
        barrier()  # alone, nobody waits for the other's save
        own = {"rank": -1}
        load(own, tmp_path / f"alone{1 - get_rank()}", no_dist=True)
        assert (own["rank"], get_world_size()) == (1 - get_rank(), 2)

    run_threads(2, on_each_rank)
    state = {"w": torch.zeros(2), "own0": torch.zeros(1), "own1": torch.zeros(1)}
    load(state, tmp_path / "both")
    assert [tensor.tolist() for tensor in state.values()] == [[1, 1], [1], [1]]
