"""Finds the ranks that save or load together, and the storage and path, whichever form a call has."""

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


class ResolvedCall(NamedTuple):
    """The ranks that save or load, the storage and the path; `is_torchs`: the call has torch's form."""

    consensus: Consensus
    storage: Storage
    path: Path
    is_torchs: bool


def resolve(
    operation: str,
    path: PathLike | None,
    storage: Storage | None,
    checkpoint_id: PathLike | None,
    endpoint: FileSystemWriter | FileSystemReader | None,
    process_group: Any,
    *,
    no_dist: bool,
) -> ResolvedCall:
    """Raises CheckpointError where it is not said, or said twice, and for a group that this rank is not in."""
    if path is not None and not (checkpoint_id is None and endpoint is None):
        raise CheckpointError(operation, "both of path and checkpoint_id are given.", _ONE)
    if endpoint is not None and storage is None:
        chosen, where = endpoint.located(checkpoint_id)
    else:
        location = path if path is not None else checkpoint_id
        if location is None and endpoint is not None:
            location = endpoint.path
        if location is None:
            raise CheckpointError(operation, "neither of path and checkpoint_id are given.", _ONE)
        chosen, where = locate(Path(location) if isinstance(location, os.PathLike) else location, storage)
    group = None if no_dist else _part_of_world(operation, process_group)
    return ResolvedCall(Consensus(operation, alone=no_dist, group=group), chosen, where, is_torchs=path is None)


_ONE = "Give one: a path or a URL."


def _part_of_world(operation: str, group: Any) -> ProcessGroup | None:
    """The group, unless it has all ranks. torch's own groups are taken by their ranks."""
    if group is None or not is_initialized():
        return None
    world = current_world(operation)
    ranks = group.ranks if isinstance(group, ProcessGroup) else _ranks_of_torchs(group)
    if ranks is None or world.rank not in ranks:
        problem = f"has ranks {list(ranks)}" if ranks is not None else f"is a {type(group).__name__}"
        raise CheckpointError(
            operation,
            f"process_group= {problem}.",
            "Give a group that this rank is in; its members alone call.",
            rank=world.rank,
        )
    if len(ranks) == world.world_size:
        return None
    return group if isinstance(group, ProcessGroup) else world.shared_group(tuple(ranks))


def _ranks_of_torchs(group: Any) -> tuple[int, ...] | None:
    """The global ranks of a group of torch.distributed, whose default group is ours; None for what is none."""
    torch_dist = sys.modules.get("torch.distributed")
    if torch_dist is None or not isinstance(group, torch_dist.ProcessGroup):
        return None
    return tuple(torch_dist.get_process_group_ranks(group))
