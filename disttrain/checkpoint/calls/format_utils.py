"""Saves as single files of torch.save, and back: what torch has in `torch.distributed.checkpoint.format_utils`."""

from __future__ import annotations

import os
from typing import Any

import torch

from disttrain.checkpoint.calls.opening import open_ours_or_torchs
from disttrain.checkpoint.calls.saves import save
from disttrain.checkpoint.calls.writers import PathLike, checked_path
from disttrain.checkpoint.interop.torch_files import open_torch
from disttrain.checkpoint.loading.whole import read_full
from disttrain.checkpoint.stateful import PerRank
from disttrain.checkpoint.storage.base import locate
from disttrain.errors import CheckpointError


def dcp_to_torch_save(dcp_checkpoint_dir: PathLike, torch_save_path: PathLike) -> None:
    """Writes a save, of ours or of torch.distributed.checkpoint, as one file of torch.save with whole tensors.

    Of values per rank the file has that of rank 0. Not collective: one process reads all of the save.
    Raises:  CheckpointError when there is no save, CheckpointCorruptError when it is damaged.
    """
    target = checked_path("dcp_to_torch_save", torch_save_path)
    source = checked_path("dcp_to_torch_save", dcp_checkpoint_dir)
    if os.path.isdir(target):
        raise CheckpointError("dcp_to_torch_save", f"{target} is a folder.", "Give the file to write.")
    torch.save(_plain(read_full(open_ours_or_torchs(*locate(source)))), target)


def torch_save_to_dcp(torch_save_path: PathLike, dcp_checkpoint_dir: PathLike) -> None:
    """Writes a file of torch.save, a dict of tensors and plain values to any depth, as a save that `load` reads.

    Not collective: one process writes all of the save.
    Raises:  CheckpointError for a file that holds more than these, which is not unpickled.
    """
    source = checked_path("torch_save_to_dcp", torch_save_path)
    if os.path.isdir(source):
        raise CheckpointError("torch_save_to_dcp", f"{source} is a folder.", "Give the file that torch.save wrote.")
    state = read_full(open_torch(*locate(source)))
    save(state, checkpoint_id=dcp_checkpoint_dir, no_dist=True)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Puts the values themselves in place of PerRank."""
    return {
        key: _plain(value) if isinstance(value, dict) else value.value if isinstance(value, PerRank) else value
        for key, value in state.items()
    }
