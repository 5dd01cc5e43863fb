"""Opens a folder's save in either of the two formats that calls in torch's form read."""

from __future__ import annotations

from pathlib import Path

from disttrain.checkpoint.format.manifest import MANIFEST
from disttrain.checkpoint.format.source import Source
from disttrain.checkpoint.interop.dcp import METADATA, open_dcp
from disttrain.checkpoint.loading.load import open_save
from disttrain.checkpoint.storage.base import Storage
from disttrain.checkpoint.storage.folders import standing


def open_ours_or_torchs(storage: Storage, folder: Path) -> Source:
    """A save of ours, or of torch.distributed.checkpoint. Raises CheckpointError when there is neither."""
    folder = standing(storage, folder)
    names = storage.names(folder)
    if METADATA in names and MANIFEST not in names:
        return open_dcp(storage, folder)
    return open_save(storage, folder)
