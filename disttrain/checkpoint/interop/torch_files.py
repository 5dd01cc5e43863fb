"""Reading files of torch.save: of the tensors only the bytes that are needed, and nothing that the pickle would run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disttrain._python.pickles import Made, Map, Name
from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.dtypes import dtype_name
from disttrain.checkpoint.format.manifest import Chunk, Manifest, SavedTensor
from disttrain.checkpoint.format.source import Source
from disttrain.checkpoint.interop.foreign import ForeignReader, chunk_of, manifest_of
from disttrain.checkpoint.interop.names import OwnNames
from disttrain.checkpoint.interop.torch_zip import Archive, StoredTensor
from disttrain.checkpoint.state.tree import name_of
from disttrain.checkpoint.storage.base import Storage
from disttrain.errors import CheckpointError


@dataclass
class _Found:
    """The leaves of the file's state: where each tensor is, and the values."""

    tensors: dict[str, StoredTensor]
    values: dict[str, Any]


def open_torch(storage: Storage, path: Path) -> Source:
    """A file of torch.save that holds a dict. Raises CheckpointError when it is none, or has more than plain values."""
    try:
        with storage.open_file(path) as file:
            archive = Archive(file, 0, file.num_bytes, str(path))
            leaves = _Found({}, {})
            root = _pairs(archive.root)
            if root is None:
                raise CheckpointError("load_torch", f"{path} holds no dict.", "Save a state dict.")
            _descend(archive, (), root, leaves)
    except FileNotFoundError:
        raise CheckpointError("load_torch", f"{path} is not there.", "Give a file of torch.save.") from None
    firsts: dict[StoredTensor, str] = {}
    same_as = {name: first for name, at in leaves.tensors.items() if (first := firsts.setdefault(at, name)) != name}
    tensors = {
        name: SavedTensor(
            stored.shape, dtype_name(stored.dtype), (chunk_of(path.name, stored),) * (0 not in stored.shape)
        )
        for stored, name in firsts.items()
    }
    values = {name: Chunk(path.name, number, 0, Box((), ()), b"") for number, name in enumerate(leaves.values)}
    manifest = manifest_of("torch.save", "", tensors, values, same_as)
    reader = _TorchReader(storage, path.parent, manifest, list(leaves.values.values()))
    return Source(str(path), manifest, reader, OwnNames())


class _TorchReader(ForeignReader):
    """Has the values already: they are in the pickle. A value's chunk has its number for an offset."""

    def __init__(self, storage: Storage, folder: Path, manifest: Manifest, values: list[Any]) -> None:
        super().__init__(storage, folder, manifest)
        self._values = values

    def read_values(self, chunks: Mapping[str, Chunk]) -> dict[str, Any]:
        return {name: self._values[chunk.offset] for name, chunk in chunks.items()}


def _descend(archive: Archive, path: tuple[str, ...], pairs: Map, leaves: _Found) -> None:
    for key, node in pairs:
        inner_path = (*path, str(key))
        inner, stored = _pairs(node), archive.tensor(node)
        if stored is not None:
            leaves.tensors[name_of(inner_path)] = stored
        elif inner is not None and all(isinstance(key, str) for key, _ in inner):
            _descend(archive, inner_path, inner, leaves)
        else:
            leaves.values[name_of(inner_path)] = archive.plain(node, archive.tensor_in_memory)


def _pairs(node: Any) -> Map | None:
    """A dict's pairs; None for what is no dict."""
    if isinstance(node, Map):
        return node
    is_ordered = isinstance(node, Made) and node.what == Name("collections", "OrderedDict")
    return Map(node.items or []) if is_ordered else None
