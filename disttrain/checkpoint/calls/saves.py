"""`save`: everything of it is on the disk when it returns."""

from __future__ import annotations

from typing import Any

from disttrain.checkpoint.calls.planners import check_save_planner
from disttrain.checkpoint.calls.resolving import resolve
from disttrain.checkpoint.calls.writers import HuggingFaceStorageWriter, PathLike, as_writer
from disttrain.checkpoint.interop.calls import MAX_FILE_BYTES, without_empty
from disttrain.checkpoint.interop.exporting import save_as
from disttrain.checkpoint.interop.safetensors_writing import SafetensorsFormat
from disttrain.checkpoint.saving.save import save_folder
from disttrain.checkpoint.storage.base import Storage


def save(
    state_dict: dict[str, Any],
    path: PathLike | None = None,
    *,
    storage: Storage | None = None,
    overwrite: bool | None = None,
    checkpoint_id: PathLike | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> None:
    """Save a state into the folder `path`.

    Args:    state_dict  dicts, to any depth, of tensors, DTensors, modules, Statefuls, PerRank and plain values. Plain
                         values must be equal on all ranks, and so must plain tensors on CPUs that are like values:
                         of one number, or few integers. Other plain tensors are taken to be: one rank writes them. A
                         data loader of torchdata is taken as PerRank.
             storage     where `path` is; default: what a URL such as `s3://bucket/x` means to fsspec, else files.
             overwrite   whether a save that is there gives way, when the new one is whole; False: this one is refused.
                         Default: False for `path`, True in torch's form. What else is there is never removed.
             checkpoint_id, storage_writer  torch's form of `path`, see `calls/writers.py`
             process_group  whose ranks save, and alone call; default: all.
             no_dist     this process saves alone
             planner, use_collectives  change nothing
    Returns: once all is on the disk, and `path` is a whole save.
    Raises:  CheckpointError, on every rank, when it could not be saved on some; then `path` is as it was. Rank 0 warns
             when there is no tensor in what is saved.
    Collective: every rank of the group, or one process without a world.
    """
    check_save_planner("save", planner)
    writer = None if storage_writer is None else as_writer("save", storage_writer)
    call = resolve("save", path, storage, checkpoint_id, writer, process_group, no_dist=no_dist)
    overwrites = overwrite
    if overwrites is None:
        overwrites = call.is_torchs and (writer is None or writer.overwrite)
    consensus, target = call.consensus, call.path
    if isinstance(writer, HuggingFaceStorageWriter):
        form = SafetensorsFormat(MAX_FILE_BYTES, writer.fqn_to_index_mapping or {})
        save_as(consensus, without_empty(state_dict), target, call.storage, form, overwrites=overwrites)
    else:
        save_folder(consensus, state_dict, target, call.storage, overwrites=overwrites, is_marked=call.is_torchs)
