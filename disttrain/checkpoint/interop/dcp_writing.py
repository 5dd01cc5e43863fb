"""Writes torch.distributed.checkpoint's folders, for its `load`. Pickles are written opcode by opcode; no object is
pickled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from disttrain._python.pickles import Made, Map, Name
from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.dtypes import dtype_named
from disttrain.checkpoint.format.manifest import Manifest
from disttrain.checkpoint.format.source import Source
from disttrain.checkpoint.interop.dcp import METADATA, METADATA_MODULE, STORAGE_INFO
from disttrain.checkpoint.interop.exporting import Advance, read_box, refuse_values_per_rank
from disttrain.checkpoint.interop.names import dotted, dotted_names
from disttrain.checkpoint.interop.pickle_writing import dumps
from disttrain.checkpoint.interop.torch_zip import archive_of
from disttrain.checkpoint.state.tree import parts_of
from disttrain.checkpoint.storage.base import Storage

_PART_BYTES = 64 << 20
_FILE_BYTES = 1 << 30

Piece = tuple[str, Box | None]
"""A part of a tensor; or a value, which has no box."""


class DcpFormat:
    """Satisfies `Format`. A job is the pieces of one file; its row has their lengths."""

    def jobs(self, manifest: Manifest) -> list[list[Piece]]:
        refuse_values_per_rank("save_dcp", manifest)
        dotted_names((*manifest.tensors, *manifest.values, *manifest.same_as))
        files: list[list[Piece]] = [[]]
        num_bytes = 0
        for (name, box), size in self._pieces(manifest):
            if num_bytes + size > _FILE_BYTES and files[-1]:
                files.append([])
                num_bytes = 0
            files[-1].append((name, box))
            num_bytes += size
        return files

    def _pieces(self, manifest: Manifest) -> Iterator[tuple[Piece, int]]:
        for name, tensor in manifest.tensors.items():
            item_size = dtype_named(tensor.dtype).itemsize
            for box in Box.whole(tensor.shape).split(_PART_BYTES // item_size):
                yield (name, box), box.num_elements * item_size
        for name, chunk in manifest.values.items():
            yield (name, None), chunk.num_bytes

    def write(self, storage: Storage, folder: Path, source: Source, job: list[Piece], advance: Advance) -> list[Any]:
        name = f"__{uuid4().hex}_0.distcp"
        lengths: list[int] = []
        storage.write_file(folder / name, _archives(source, job, lengths, advance))
        return [name, lengths]

    def finish(self, storage: Storage, folder: Path, manifest: Manifest, rows: list[Any]) -> None:
        items: list[tuple[Any, Any]] = []
        seen: dict[str, list[Box]] = {}
        for job, (file, lengths) in zip(self.jobs(manifest), rows, strict=True):
            offset = 0
            for (name, box), length in zip(job, lengths, strict=True):
                boxes = seen.setdefault(name, [])
                index: dict[str, Any] = {"fqn": dotted(name)}
                if box is not None:
                    index |= {"offset": _size(box.origin), "index": len(boxes)}
                    boxes.append(box)
                info = {"relative_path": file, "offset": offset, "length": length}
                items.append((_new("MetadataIndex", index), Made(STORAGE_INFO, (), True, info)))
                offset += length
        # torch's format has no entry for second names: such a name becomes another tensor with the same bytes.
        named = {name: name for name in (*manifest.tensors, *manifest.values)} | dict(manifest.same_as)
        described = {dotted(name): _described(manifest, first, seen[first]) for name, first in named.items()}
        for name, first in manifest.same_as.items():
            items += [(_renamed(index, name), info) for index, info in items if index.state["fqn"] == dotted(first)]
        metadata = {
            "state_dict_metadata": described,
            "planner_data": {dotted(name): tuple(parts_of(name)) for name in named},
            "storage_data": Map(items),
            "storage_meta": _new("StorageMeta", {"save_id": manifest.save_id, "modules": []}),
            "version": "1.0.0",
        }
        storage.write_file(folder / METADATA, [memoryview(dumps(_new("Metadata", metadata)))])


def _archives(source: Source, job: list[Piece], lengths: list[int], advance: Advance) -> Iterator[memoryview]:
    values = {name: source.manifest.values[name] for name, box in job if box is None}
    read = source.reader.read_values(values)
    for name, box in job:
        data = archive_of(read[name] if box is None else read_box(source, name, box))
        lengths.append(len(data))
        yield memoryview(data)
        advance(len(data))


def _described(manifest: Manifest, name: str, boxes: list[Box]) -> Made:
    tensor = manifest.tensors.get(name)
    if tensor is None:
        return _new("BytesStorageMetadata", {})
    layout = Made(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Made(Name(METADATA_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
    properties = (Name("torch", tensor.dtype), layout, False, contiguous, False)
    chunks = [_new("ChunkStorageMetadata", {"offsets": _size(box.origin), "sizes": _size(box.shape)}) for box in boxes]
    fields = {"properties": _new("TensorProperties", properties), "size": _size(tensor.shape), "chunks": chunks}
    assert sum(map(math.prod, (box.shape for box in boxes))) == math.prod(tensor.shape)
    return _new("TensorStorageMetadata", fields)


def _renamed(index: Made, name: str) -> Made:
    return _new("MetadataIndex", {**index.state, "fqn": dotted(name)})


def _new(kind: str, state: Any) -> Made:
    return Made(Name(METADATA_MODULE, kind), (), is_object=True, state=state)


def _size(sizes: tuple[int, ...]) -> Made:
    return Made(Name("torch", "Size"), (sizes,))
