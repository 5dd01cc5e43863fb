"""Who saves or loads together, and where, whichever form a call has."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from disttrain.checkpoint.calls.writers import FileSystemReader, FileSystemWriter, PathLike
from disttrain.checkpoint.saving.consensus import Consensus
from disttrain.checkpoint.storage.base import Storage, locate
from disttrain.errors import CheckpointError
from disttrain.process_group import ProcessGroup, current_world, is_initialized


class Meeting(NamedTuple):
    """Who saves or loads, and where; `is_torchs`: by torch's form of the call."""

    consensus: Consensus
    storage: Storage
    path: Path
    is_torchs: bool


def meet(
    operation: str,
    path: PathLike | None,
    storage: Storage | None,
    checkpoint_id: PathLike | None,
    place: FileSystemWriter | FileSystemReader | None,
    process_group: Any,
    *,
    no_dist: bool,
) -> Meeting:
    """Raises CheckpointError where it is not said, or said twice, and for a group that this rank is not in."""
    if path is not None and not (checkpoint_id is None and place is None):
        raise CheckpointError(operation, "both of path and checkpoint_id are given.", _ONE)
    if place is not None and storage is None:
        found, where = place.located(checkpoint_id)
    else:
        given = path if path is not None else checkpoint_id
        if given is None and place is not None:
            given = place.path
        if given is None:
            raise CheckpointError(operation, "neither of path and checkpoint_id are given.", _ONE)
        found, where = locate(Path(given) if isinstance(given, os.PathLike) else given, storage)
    group = None if no_dist else _part_of_world(operation, process_group)
    return Meeting(Consensus(operation, alone=no_dist, group=group), found, where, is_torchs=path is None)


_ONE = "Give one: a path or a URL."


def _part_of_world(operation: str, given: Any) -> ProcessGroup | None:
    """The group, unless it has all ranks. torch's own groups are taken by their ranks."""
    if given is None or not is_initialized():
        return None
    world = current_world(operation)
    ranks = given.ranks if isinstance(given, ProcessGroup) else _ranks_of_torchs(given)
    if ranks is None or world.rank not in ranks:
        what = f"has ranks {list(ranks)}" if ranks is not None else f"is a {type(given).__name__}"
        raise CheckpointError(
            operation,
            f"process_group= {what}.",
            "Give a group that this rank is in; its members alone call.",
            rank=world.rank,
        )
    if len(ranks) == world.world_size:
        return None
    return given if isinstance(given, ProcessGroup) else world.shared_group(tuple(ranks))


def _ranks_of_torchs(given: Any) -> tuple[int, ...] | None:
    """The global ranks of a group of torch.distributed, whose default group is ours; None for what is none."""
    torch_dist = sys.modules.get("torch.distributed")
    if torch_dist is None or not isinstance(given, torch_dist.ProcessGroup):
        return None
    return tuple(torch_dist.get_process_group_ranks(given))
