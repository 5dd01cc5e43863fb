"""Reading torch.distributed.checkpoint's folders: `.metadata`, a pickle, and `.distcp` files, a torch.save per item.

The pickle is read as data and never run. Of the data files only the bytes are read that a rank needs, whatever number
of ranks wrote them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from disttrain._python.pickles import Made, Map, Name, parse
from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.dtypes import dtype_name
from disttrain.checkpoint.format.manifest import TORCH_METADATA, Chunk, Manifest, SavedTensor, plain_name
from disttrain.checkpoint.format.rules import can_be_a_shape
from disttrain.checkpoint.format.source import Source
from disttrain.checkpoint.interop.foreign import ForeignReader, chunk_of, manifest_of
from disttrain.checkpoint.interop.joining import joined
from disttrain.checkpoint.interop.names import OwnNames
from disttrain.checkpoint.interop.torch_zip import Archive
from disttrain.checkpoint.plan import Read
from disttrain.checkpoint.state.tree import name_of
from disttrain.checkpoint.storage.base import ReadableFile, Storage, read_small
from disttrain.errors import CheckpointError

METADATA = TORCH_METADATA
METADATA_MODULE = "torch.distributed.checkpoint.metadata"
STORAGE_INFO = Name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE = Name("torch", "Size")


def open_dcp(storage: Storage, folder: Path) -> Source:
    """A folder that torch.distributed.checkpoint wrote. Raises CheckpointError when it is none."""
    if METADATA not in storage.names(folder):
        raise CheckpointError(
            "load_dcp", f"{folder} has no {METADATA}.", "Give a folder of torch.distributed.checkpoint."
        )
    manifest = _Metadata(str(folder / METADATA), read_small(storage, folder / METADATA)).manifest()
    return Source(str(folder), manifest, DcpReader(storage, folder, manifest), OwnNames(), joined)


class _Metadata:
    """The contents of a `.metadata` file."""

    def __init__(self, where: str, data: bytes) -> None:
        self._where = where
        try:
            self._root = parse(data)
        except ValueError as error:
            raise CheckpointError("load_dcp", f"{where} {error}.", "Load another save.") from error

    def manifest(self) -> Manifest:
        try:
            return self._manifest()
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
            raise self._refused(f"lacks or misspells {error}") from error

    def _manifest(self) -> Manifest:
        root = self._fields(self._root, "Metadata")
        paths = {key: path for key, path in root.get("planner_data") or Map() if isinstance(path, tuple)}
        items: dict[tuple[str, tuple[int, ...] | None], Chunk] = {}
        for index, info in root["storage_data"]:
            index_fields = self._fields(index, "MetadataIndex")
            offset = None if index_fields.get("offset") is None else self._sizes(index_fields["offset"])
            items[index_fields["fqn"], offset] = self._item(info)
        tensors: dict[str, SavedTensor] = {}
        values: dict[str, Chunk] = {}
        for key, described in root["state_dict_metadata"]:
            name = name_of(map(str, paths.get(key, (key,))))
            if self._kind(described) == "BytesStorageMetadata":
                values[name] = items[key, None]
            else:
                tensors[name] = self._tensor(key, self._fields(described, "TensorStorageMetadata"), items)
        save_id = (
            "" if root.get("storage_meta") is None else self._fields(root["storage_meta"], "StorageMeta")["save_id"]
        )
        return manifest_of("torch.distributed.checkpoint", str(save_id), tensors, values)

    def _tensor(self, key: str, fields: dict[str, Any], items: dict[Any, Chunk]) -> SavedTensor:
        dtype = fields["properties"].state[0]
        if not isinstance(dtype, Name) or dtype.module != "torch":
            raise self._refused(f"has {dtype} for a dtype")
        chunks = []
        for chunk in fields["chunks"]:
            chunk_fields = self._fields(chunk, "ChunkStorageMetadata")
            box = Box(self._sizes(chunk_fields["offsets"]), self._sizes(chunk_fields["sizes"]))
            if box.num_elements:
                chunks.append(replace(items[key, box.origin], box=box))
        return SavedTensor(self._sizes(fields["size"]), dtype.name, tuple(chunks))

    def _item(self, info: Any) -> Chunk:
        if not isinstance(info, Made) or info.what != STORAGE_INFO:
            raise self._refused(f"has {_named(info)} where {STORAGE_INFO} belongs")
        fields = dict(info.state)
        if fields.get("transform_descriptors"):
            raise self._refused(f"has items that were changed by {fields['transform_descriptors']}")
        offset, length = fields["offset"], fields["length"]
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise ValueError(f"offset {offset}, length {length}")
        return Chunk(plain_name(fields["relative_path"]), offset, length, Box((), ()), b"")

    def _kind(self, node: Any) -> str:
        if not isinstance(node, Made) or not isinstance(node.what, Name) or node.what.module != METADATA_MODULE:
            raise self._refused(f"would make {_named(node)}, which DCP's metadata do not have")
        return node.what.name

    def _fields(self, node: Any, kind: str) -> dict[str, Any]:
        if self._kind(node) != kind:
            raise self._refused(f"has {node.what} where {kind} belongs")
        return dict(node.state)

    def _sizes(self, node: Any) -> tuple[int, ...]:
        if not isinstance(node, Made) or node.what != _SIZE:
            raise self._refused(f"has {_named(node)} where sizes belong")
        (sizes,) = node.args
        if any(type(size) is not int or size < 0 for size in sizes) or not can_be_a_shape(sizes, 1):
            raise ValueError(f"sizes {sizes}")
        return tuple(sizes)

    def _refused(self, problem: str) -> CheckpointError:
        return CheckpointError(
            "load_dcp", f"{self._where} {problem}.", "Save it again with torch.distributed.checkpoint."
        )


def _named(node: Any) -> str:
    return str(node.what) if isinstance(node, Made) else type(node).__name__


class DcpReader(ForeignReader):
    """Finds, within the item of each chunk, where its bytes are."""

    def __init__(self, storage: Storage, folder: Path, manifest: Manifest) -> None:
        super().__init__(storage, folder, manifest)
        # Items of tensors of one shape have the same pickle.
        self._known: dict[bytes, Any] = {}

    def _located(self, reads: Sequence[Read]) -> list[Read]:
        located = []
        for file_name, of_file in itertools.groupby(reads, key=lambda read: read.chunk.file):
            with self.opened(file_name) as file:
                located += [self._in_item(file, read) for read in of_file]
        return located

    def _in_item(self, file: ReadableFile, read: Read) -> Read:
        where = f"{read.name!r} in {self.folder / read.chunk.file}"
        archive = Archive(file, read.chunk.offset, read.chunk.num_bytes, where, self._known)
        stored = archive.tensor(archive.root)
        if stored is None or (stored.shape, dtype_name(stored.dtype)) != (read.chunk.box.shape, read.dtype):
            raise CheckpointError("load_dcp", f"{where} is not what {METADATA} says.", "Load another save.")
        return replace(read, chunk=replace(chunk_of(read.chunk.file, stored), box=read.chunk.box))

    def unpacked(self, file_name: str, name: str, data: bytes) -> Any:
        archive = Archive(_Bytes(data), 0, len(data), f"{name!r} in {self.folder / file_name}")
        return archive.plain(archive.root, archive.tensor_in_memory)


class _Bytes:
    """Bytes in memory, as a file."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.num_bytes = len(data)

    def read_at(self, offset: int, buffer: memoryview) -> int:
        data = self._data[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        return len(data)
