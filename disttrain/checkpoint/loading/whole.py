"""A whole save in one process: nested dicts of plain tensors and values, whatever ranks saved it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.source import Source
from disttrain.checkpoint.loading.filling import allocated, owner_of
from disttrain.checkpoint.loading.load import open_save
from disttrain.checkpoint.plan import plan_load
from disttrain.checkpoint.state.tree import parts_of
from disttrain.checkpoint.stateful import PerRank
from disttrain.checkpoint.storage.base import Storage, locate
from disttrain.errors import CheckpointError


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
    # Planned first: no memory is asked for what is not there.
    boxes = {name: Box.whole(saved.shape) for name, saved in manifest.tensors.items()}
    reads = plan_load(manifest, {name: [whole] for name, whole in boxes.items() if whole.num_elements})
    tensors = {name: allocated(_empty, name, saved) for name, saved in manifest.tensors.items()}
    targets = {name: {boxes[name]: tensor} for name, tensor in tensors.items() if tensor.numel()}
    reader.read_tensors(reads, targets)
    owners = {name: owner_of(chunks, 0) for name, chunks in manifest.per_rank.items()}
    per_rank = reader.read_values({name: manifest.per_rank[name][owner] for name, owner in owners.items()})
    leaves = {
        **tensors,
        **{name: tensors[first] for name, first in manifest.same_as.items()},
        **reader.read_values(manifest.values),
        **{name: PerRank(value, owners[name]) for name, value in per_rank.items()},
    }
    above = {name[:at] for name in leaves for at, sign in enumerate(name) if sign == "/"}
    state: dict[str, Any] = {}
    for name, leaf in leaves.items():
        if name not in above:
            _put(state, name, leaf)
        elif not isinstance(leaf, dict) or leaf:  # of empty dicts nothing is lost where another rank had more
            problem = f"{name!r} is a leaf, and there are others below it: ranks had different things there."
            raise CheckpointError("load_full", problem, "Load it with `load`, as the ranks had it.")
    return state


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _put(state: dict[str, Any], name: str, leaf: Any) -> None:
    *inner, last = parts_of(name)
    for key in inner:
        state = state.setdefault(key, {})
    state[last] = leaf
