"""The forms in which torch.distributed.checkpoint is called, for our `save` and `load`: what makes sense is taken."""

from __future__ import annotations

from pathlib import Path

from disttrain.checkpoint.agreement import Council
from disttrain.errors import CheckpointError
from disttrain.process_group import ProcessGroup, current_world, is_initialized

_INSTEAD = {
    "storage_writer": "Give storage=, or checkpoint_id= with a path or a URL.",
    "storage_reader": "Give storage=, or checkpoint_id= with a path or a URL; load_dcp reads torch's own folders.",
    "planner": "A load takes allow=, rename= and convert= instead.",
}


def meet(
    operation: str,
    path: str | Path | None,
    checkpoint_id: str | Path | None,
    process_group: ProcessGroup | None,
    no_dist: bool,
    **refused: object,
) -> tuple[Council, str | Path]:
    """Who saves or loads together, and where. Raises CheckpointError for what only torch's own has."""
    for name, value in refused.items():
        if value is not None:
            raise CheckpointError(operation, f"{name}= is torch.distributed.checkpoint's alone.", _INSTEAD[name])
    if (path is None) == (checkpoint_id is None):
        given = "neither" if path is None else "both"
        raise CheckpointError(operation, f"{given} of path and checkpoint_id are given.", "Give one: a path or a URL.")
    is_whole = is_initialized() and process_group is current_world(operation).default_group
    if process_group is not None and not is_whole:
        raise CheckpointError(
            operation, "process_group= is not the default group.", f"All ranks {operation} together; leave it out."
        )
    where = path if path is not None else checkpoint_id
    assert where is not None
    return Council(operation, alone=no_dist), where
