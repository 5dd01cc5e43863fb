"""`load`: fills a state from a save, of ours or, where it is named so, of torch's and Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from disttrain.checkpoint.calls.opening import open_ours_or_torchs
from disttrain.checkpoint.calls.planners import allows_partial_load
from disttrain.checkpoint.calls.resolving import resolve
from disttrain.checkpoint.calls.writers import (
    BroadcastingTorchSaveReader,
    HuggingFaceStorageReader,
    PathLike,
    as_reader,
)
from disttrain.checkpoint.interop.safetensors_files import open_safetensors
from disttrain.checkpoint.interop.torch_files import open_torch
from disttrain.checkpoint.loading.fits import LoadReport, Misfit, Rename, Rules
from disttrain.checkpoint.loading.load import load_source
from disttrain.checkpoint.storage.base import Storage


def load(
    state_dict: dict[str, Any],
    path: PathLike | None = None,
    *,
    storage: Storage | None = None,
    allow: Iterable[Misfit] = (),
    rename: Rename | None = None,
    convert: str | Iterable[str] = (),
    shares_reads: bool = True,
    checkpoint_id: PathLike | None = None,
    storage_reader: Any = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
) -> LoadReport:
    """Load a save into a state of the same names, in place: one of ours, or one of torch.distributed.checkpoint.

    Tensors are filled as they lie, on however many ranks; values are replaced; modules and Statefuls take on their
    state.
    Args:    allow    what may be left alone instead of being an error: "missing" from the save, "unexpected" in it,
                      "mismatched" in kind, shape or dtype
             rename   the state's name for a name in the save, as a function or a dict of those that differ
             convert  names, or patterns such as "model/*", of tensors whose dtype may differ from the saved one
             shares_reads  what several ranks want alike, one of them reads for all; False: each for itself, which is
                      faster where storage is faster than the network
             checkpoint_id, storage_reader  torch's form of `path`, see `calls/writers.py`: then "unexpected" names are
                      allowed, and all dtypes converted, as torch does
             planner  a `DefaultLoadPlanner(allow_partial_load=True)` allows "missing" names
             process_group  whose ranks load, and alone call; default: all.  no_dist  this process loads alone
    Returns: what was left alone, and what was converted; the same on every rank.
    Raises:  CheckpointError, on every rank, when there is no save, or when names, shapes or dtypes differ and may not:
             then nothing has been touched. CheckpointCorruptError when bytes are not those that were saved: then the
             state is partly loaded, and must not be used.
    Collective: every rank of the group, or one process without a world.
    """
    rules = Rules.of(allow, convert, rename)
    if allows_partial_load("load", planner):
        rules = replace(rules, allow=rules.allow | {"missing"})
    reader = None if storage_reader is None else as_reader("load", storage_reader)
    call = resolve("load", path, storage, checkpoint_id, reader, process_group, no_dist=no_dist)
    if call.is_torchs:
        rules = replace(rules, allow=rules.allow | {"unexpected"}, convert=(*rules.convert, "*"))
    opened = _OPENED_BY.get(type(reader), open_ours_or_torchs)
    return load_source(
        call.consensus,
        state_dict,
        lambda: opened(call.storage, call.path),
        rules,
        shares_reads=shares_reads,
    )


_OPENED_BY = {HuggingFaceStorageReader: open_safetensors, BroadcastingTorchSaveReader: open_torch}
