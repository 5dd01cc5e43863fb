"""`async_save`: returns as soon as the values are safe, and goes on in a process of its own."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from disttrain.checkpoint.async_saving.saver import AsyncSaver
from disttrain.checkpoint.calls.planners import check_save_planner
from disttrain.checkpoint.calls.resolving import resolve
from disttrain.checkpoint.calls.stagers import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    stages_asynchronously,
)
from disttrain.checkpoint.calls.writers import HuggingFaceStorageWriter, PathLike, as_writer
from disttrain.checkpoint.storage.base import Portable, Storage
from disttrain.errors import CheckpointError


def async_save(
    state_dict: dict[str, Any],
    path: PathLike | None = None,
    *,
    storage: Storage | None = None,
    optimizers: Iterable[Optimizer] = (),
    overwrite: bool | None = None,
    checkpoint_id: PathLike | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.PROCESS,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Any:
    """`save`, but return as soon as the values are safe from what comes next; a process of its own writes them.

    Args:    storage, path  as in `save`; the storage must be `Portable`, since the other process has it as well
             optimizers  those whose next step is the next to write the parameters and their own state, on GPUs: their
                         step waits, on the GPU, for the copies. What they don't own, the current stream waits for at
                         once; nothing waits on the host.
             async_stager, async_checkpointer_type  torch's; values are staged, and a process writes them, in any case
             overwrite and all others  as in `save`
    Returns: PendingSave, a future that ends when the save is whole; with an `async_stager` that stages asynchronously
             AsyncSaveResponse, as torch.
    Raises:  CheckpointError, on every rank, when an earlier save of this world has failed.
    Collective: every rank of the group, or one process without a world; the first call waits for all ranks.
    Two saves may be under way; a third waits for the first. `Checkpointer` has other ways.
    """
    check_save_planner("async_save", planner)
    writer = None if storage_writer is None else as_writer("async_save", storage_writer)
    if isinstance(writer, HuggingFaceStorageWriter):
        raise CheckpointError(
            "async_save", "a HuggingFaceStorageWriter's files are made from a whole save.", "Use `save` for them."
        )
    call = resolve("async_save", path, storage, checkpoint_id, writer, process_group, no_dist=no_dist)
    overwrites = overwrite
    if overwrites is None:
        overwrites = call.is_torchs and (writer is None or writer.overwrite)
    consensus = call.consensus
    if consensus.world is None or consensus.party is None:
        saver = AsyncSaver(call.storage, "wait")
    else:
        ranks = consensus.party.ranks
        saver = consensus.world.companion(_WorldSavers, _WorldSavers).of(call.storage, ranks)
    pending = saver.save(
        state_dict,
        call.path,
        optimizers,
        consensus=consensus,
        overwrites=overwrites,
        is_marked=call.is_torchs,
    )
    if consensus.world is None:
        saver.let_go()
    return AsyncSaveResponse(pending.staged, pending) if stages_asynchronously(async_stager) else pending


class _WorldSavers:
    """A world's savers, by storage and ranks."""

    def __init__(self) -> None:
        self._savers: list[tuple[Storage, tuple[int, ...], AsyncSaver]] = []

    def of(self, storage: Storage, ranks: tuple[int, ...]) -> AsyncSaver:
        for other, members, saver in self._savers:
            if members == ranks and _is_same(other, storage):
                return saver
        saver = AsyncSaver(storage, "wait")
        self._savers.append((storage, ranks, saver))
        return saver

    def close(self) -> None:
        """Finishes all saves; failures that nobody has asked about become warnings."""
        for _, _, saver in self._savers:
            try:
                saver.close()
            except CheckpointError as error:
                warnings.warn(f"{error}", RuntimeWarning, stacklevel=2)


def _is_same(first: Storage, second: Storage) -> bool:
    if isinstance(first, Portable) and isinstance(second, Portable):
        return first.recipe() == second.recipe()
    return first is second
