"""torch's older names, for programs that still call them: of `save`, of `load`, and of what these raise."""

from __future__ import annotations

from typing import Any

from disttrain.checkpoint.calls.loads import load
from disttrain.checkpoint.calls.saves import save
from disttrain.errors import CheckpointError

CheckpointException = CheckpointError
"""torch's name for the error of a failed save or load."""


def save_state_dict(
    state_dict: dict[str, Any],
    storage_writer: Any,
    process_group: Any = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: Any = None,
) -> None:
    """Saves as `save` in torch's form; `coordinator_rank` changes nothing."""
    save(state_dict, storage_writer=storage_writer, process_group=process_group, no_dist=no_dist, planner=planner)


def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: Any,
    process_group: Any = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: Any = None,
) -> None:
    """Loads as `load` in torch's form; `coordinator_rank` changes nothing."""
    load(state_dict, storage_reader=storage_reader, process_group=process_group, no_dist=no_dist, planner=planner)
