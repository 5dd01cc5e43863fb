"""The contents of a save without its bytes, in torch's own classes, as `StorageReader.read_metadata` returns them."""

from __future__ import annotations

from typing import Any

import torch

from disttrain.checkpoint.format.dtypes import dtype_named
from disttrain.checkpoint.format.manifest import Manifest, TensorEntry
from disttrain.checkpoint.state.tree import parts_of


def as_metadata(manifest: Manifest) -> Any:
    """torch's Metadata: by dotted name, a tensor's size, dtype and chunks, or that it is a value."""
    # Of all torch.distributed.checkpoint, which nobody else here needs.
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

    tensors = {**manifest.tensors, **{name: manifest.tensors[first] for name, first in manifest.same_as.items()}}
    entries: dict[str, Any] = {name: _of_tensor(saved) for name, saved in tensors.items()}
    entries |= {name: BytesStorageMetadata() for name in (*manifest.values, *manifest.per_rank)}
    paths = {name: tuple(parts_of(name)) for name in entries}
    return Metadata(
        {".".join(paths[name]): entry for name, entry in entries.items()},
        planner_data={".".join(path): path for path in paths.values()},
    )


def _of_tensor(saved: TensorEntry) -> Any:
    # Here: half a second that who asks for nothing of torch's should not wait.
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

    chunks = [ChunkStorageMetadata(torch.Size(box.origin), torch.Size(box.shape)) for box in saved.boxes]
    return TensorStorageMetadata(TensorProperties(dtype_named(saved.dtype)), torch.Size(saved.shape), chunks)
