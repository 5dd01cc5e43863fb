"""Writing safetensors folders as Hugging Face's libraries read them: files up to a size, and an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.dtypes import dtype_named, is_safetensors_dtype, safetensors_entry
from disttrain.checkpoint.format.manifest import Manifest
from disttrain.checkpoint.format.source import Source
from disttrain.checkpoint.interop.exporting import Advance, leave_out, read_box
from disttrain.checkpoint.interop.names import dotted, dotted_names
from disttrain.checkpoint.interop.safetensors_files import INDEX
from disttrain.checkpoint.storage.base import Storage
from disttrain.errors import CheckpointError

_PART_BYTES = 64 << 20


@dataclass(frozen=True)
class SafetensorsFormat:
    """Satisfies `Format`. A job is a file's name and the tensors in it; no file but that of one tensor is larger than
    `max_file_bytes`. With `file_numbers` these say, by dotted name, which of the files 1 to N a tensor goes to, and
    there is an index in any case."""

    max_file_bytes: int
    file_numbers: Mapping[str, int] | None = None

    def jobs(self, manifest: Manifest) -> list[tuple[str, list[str]]]:
        _check(manifest)
        if self.file_numbers is not None:
            return _by_number(manifest, self.file_numbers)
        files: list[list[str]] = [[]]
        num_bytes = 0
        for name in sorted(manifest.tensors, key=lambda name: -dtype_named(manifest.tensors[name].dtype).itemsize):
            size = _num_bytes(manifest, name)
            if num_bytes + size > self.max_file_bytes and files[-1]:
                files.append([])
                num_bytes = 0
            files[-1].append(name)
            num_bytes += size
        if len(files) == 1:
            return [("model.safetensors", files[0])]
        return [(_file_name(at, len(files)), names) for at, names in enumerate(files, 1)]

    def write(
        self, storage: Storage, folder: Path, source: Source, job: tuple[str, list[str]], advance: Advance
    ) -> None:
        file, names = job
        storage.write_file(folder / file, _stream(source, names, advance))

    def finish(self, storage: Storage, folder: Path, manifest: Manifest, rows: list[Any]) -> None:
        jobs = self.jobs(manifest)
        if len(jobs) == 1 and self.file_numbers is None:
            return
        index = {
            "metadata": {"total_size": sum(_num_bytes(manifest, name) for name in manifest.tensors)},
            "weight_map": {dotted(name): file for file, names in jobs for name in sorted(names)},
        }
        storage.write_file(folder / INDEX, [memoryview(json.dumps(index, indent=2).encode())])


def _file_name(number: int, num_files: int) -> str:
    return f"model-{number:05d}-of-{num_files:05d}.safetensors"


def _by_number(manifest: Manifest, numbers: Mapping[str, int]) -> list[tuple[str, list[str]]]:
    """Raises CheckpointError for tensors that no file is named for. Of no numbers at all: one file has them all."""
    files: dict[int, list[str]] = {}
    for name in manifest.tensors:
        number = numbers.get(dotted(name)) if numbers else 1
        if number is None:
            raise CheckpointError(
                "save", f"fqn_to_index_mapping has no {dotted(name)!r}.", "Name a file for each tensor, or for none."
            )
        files.setdefault(number, []).append(name)
    num_files = max([*numbers.values(), *files], default=1)
    return [(_file_name(number, num_files), files[number]) for number in sorted(files)]


def _check(manifest: Manifest) -> None:
    dotted_names(manifest.tensors)
    others = [*manifest.values, *manifest.per_rank]
    if others:
        problem = f"{others[0]!r} is no tensor, which is all that safetensors hold."
        raise CheckpointError("save_safetensors", problem, leave_out(others[0]))
    for name, tensor in manifest.tensors.items():
        if not is_safetensors_dtype(tensor.dtype):
            raise CheckpointError(
                "save_safetensors", f"{name!r} is {tensor.dtype}, which safetensors does not know.", "Convert it."
            )


def _num_bytes(manifest: Manifest, name: str) -> int:
    tensor = manifest.tensors[name]
    return Box.whole(tensor.shape).num_elements * dtype_named(tensor.dtype).itemsize


def _stream(source: Source, names: list[str], advance: Advance) -> Iterator[memoryview]:
    """A file's parts: the header, padded to a multiple of 8, then each tensor."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        tensor, size = source.manifest.tensors[name], _num_bytes(source.manifest, name)
        dtype, shape = safetensors_entry(tensor.dtype, tensor.shape, size)
        entries[dotted(name)] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        tensor = source.manifest.tensors[name]
        for box in Box.whole(tensor.shape).split(_PART_BYTES // dtype_named(tensor.dtype).itemsize):
            if box.num_elements:
                data = read_box(source, name, box).view(-1).view(torch.uint8).numpy().data
                yield data
                advance(len(data))
