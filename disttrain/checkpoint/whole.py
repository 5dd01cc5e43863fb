"""A whole save in one process: nested dicts of plain tensors and values, whatever ranks saved it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from disttrain.checkpoint.box import Box
from disttrain.checkpoint.dtypes import dtype_named
from disttrain.checkpoint.filling import owner_of
from disttrain.checkpoint.loading import Source, open_save
from disttrain.checkpoint.plan import plan_load
from disttrain.checkpoint.stateful import PerRank
from disttrain.checkpoint.storage import Storage, locate
from disttrain.checkpoint.tree import parts_of


def load_full(path: str | Path, *, storage: Storage | None = None) -> dict[str, Any]:
    """Everything in a save: dicts of whole tensors, on the CPU, and values, as nested as they were saved.

    A tensor saved under two names is one tensor. Of values per rank this process gets that of rank 0.
    Raises:  CheckpointError when there is no save, CheckpointCorruptError when it is damaged.
    Not collective: whoever calls it reads all of the save.
    """
    return read_full(open_save(*locate(path, storage)))


def read_full(source: Source) -> dict[str, Any]:
    """`load_full` of an opened save of any format."""
    manifest, reader = source.manifest, source.reader
    tensors = {
        name: torch.empty(saved.shape, dtype=dtype_named(saved.dtype)) for name, saved in manifest.tensors.items()
    }
    targets = {name: {Box.whole(tuple(tensor.shape)): tensor} for name, tensor in tensors.items() if tensor.numel()}
    reader.read_tensors(plan_load(manifest, targets), targets)
    owners = {name: owner_of(chunks, 0) for name, chunks in manifest.per_rank.items()}
    own = reader.read_values({name: manifest.per_rank[name][owner] for name, owner in owners.items()})
    leaves = {
        **tensors,
        **{name: tensors[first] for name, first in manifest.same_as.items()},
        **reader.read_values(manifest.values),
        **{name: PerRank(value, owners[name]) for name, value in own.items()},
    }
    state: dict[str, Any] = {}
    for name, leaf in leaves.items():
        parent = state
        *inner, last = parts_of(name)
        for key in inner:
            parent = parent.setdefault(key, {})
        parent[last] = leaf
    return state
