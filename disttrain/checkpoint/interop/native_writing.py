"""Writing our own format from a save of any other, as many ranks would: a file for each group of tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.dtypes import dtype_named
from disttrain.checkpoint.format.encoding import encode
from disttrain.checkpoint.format.image import Report
from disttrain.checkpoint.format.manifest import FORMAT, MANIFEST, VERSION, Manifest, file_name
from disttrain.checkpoint.format.source import Source
from disttrain.checkpoint.interop.exporting import Advance, read_box, refuse_values_per_rank
from disttrain.checkpoint.saving.commit import Contents, make_manifest
from disttrain.checkpoint.saving.save import made_by
from disttrain.checkpoint.saving.writer import Item, value_item, write_items
from disttrain.checkpoint.storage.base import Storage

_FILE_BYTES = 2 << 30


class NativeFormat:
    """Satisfies `Format`. A job is a number for the file, and the names that it holds; `save_id` is the new save's."""

    def __init__(self, save_id: str) -> None:
        self._save_id = save_id

    def jobs(self, manifest: Manifest) -> list[tuple[int, list[str]]]:
        refuse_values_per_rank("convert", manifest)
        files: list[list[str]] = [list(manifest.values)]
        num_bytes = 0
        for name, tensor in manifest.tensors.items():
            size = Box.whole(tensor.shape).num_elements * dtype_named(tensor.dtype).itemsize
            if num_bytes + size > _FILE_BYTES and files[-1]:
                files.append([])
                num_bytes = 0
            files[-1].append(name)
            num_bytes += size
        return list(enumerate(files))

    def write(
        self, storage: Storage, folder: Path, source: Source, job: tuple[int, list[str]], advance: Advance
    ) -> list[Any]:
        number, names = job
        saved = source.manifest
        values = source.reader.read_values({name: saved.values[name] for name in names if name in saved.values})
        items = [value_item(name, value) for name, value in values.items()]
        for name in names:
            whole = Box.whole(saved.tensors[name].shape) if name in saved.tensors else None
            if whole is not None and whole.num_elements:
                items.append(Item(name, whole, read_box(source, name, whole)))
        metadata = {"format": FORMAT, "version": str(VERSION), "save_id": self._save_id}
        written = write_items(storage, folder, number, items, metadata)
        advance(sum(item.num_bytes for item in items))
        return written.to_plain()

    def finish(self, storage: Storage, folder: Path, manifest: Manifest, rows: list[Any]) -> None:
        reports = [Report.from_plain(row, file_name(number)) for number, row in enumerate(rows)]
        tensors = {name: (tensor.shape, tensor.dtype) for name, tensor in manifest.tensors.items()}
        contents = Contents(made_by(), tensors, {}, dict(manifest.same_as))
        made = replace(make_manifest(self._save_id, contents, reports), world_size=1)
        storage.write_file(folder / MANIFEST, [memoryview(encode(made))])
