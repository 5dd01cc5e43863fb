"""Reading safetensors folders as Hugging Face writes them: some files, and an index that says which tensor is where.

The format: 8 bytes of header size, a JSON header, the bytes (https://huggingface.co/docs/safetensors). Of the files
only the headers are read, and the bytes that a rank needs.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.dtypes import dtype_named, dtype_of_safetensors
from disttrain.checkpoint.format.manifest import MANIFEST, Chunk, SavedTensor, plain_name
from disttrain.checkpoint.format.rules import can_be_a_shape, is_text
from disttrain.checkpoint.format.source import Source
from disttrain.checkpoint.interop.foreign import ForeignReader, manifest_of
from disttrain.checkpoint.interop.names import OwnNames
from disttrain.checkpoint.state.tree import name_of
from disttrain.checkpoint.storage.base import Storage, read_small
from disttrain.errors import CheckpointError

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
"""As the safetensors package has it."""


def open_safetensors(storage: Storage, path: Path) -> Source:
    """A safetensors file, or a folder of them. Raises CheckpointError when it is neither, or damaged."""
    names, folder = storage.names(path), path
    if path.name.endswith(SUFFIX):
        folder, files, index = path.parent, [path.name], None
    elif MANIFEST in names:
        raise CheckpointError("load_safetensors", f"{path} is one of our own saves.", "Call disttrain.checkpoint.load.")
    elif INDEX in names:
        index = _index(storage, path / INDEX)
        files = sorted(set(index.values()))
    else:
        files, index = [name for name in names if name.endswith(SUFFIX)], None
    if not files:
        raise CheckpointError("load_safetensors", f"{path} has no {SUFFIX} file.", "Give a file, or a folder of them.")
    tensors: dict[str, SavedTensor] = {}
    for file in files:
        for key, tensor in read_header(storage, folder / file).items():
            if index is not None and index.get(key) != file:
                continue
            if name_of([key]) in tensors:
                raise CheckpointError("load_safetensors", f"{path} has {key!r} in two files.", f"Give it an {INDEX}.")
            tensors[name_of([key])] = tensor
    lacking = sorted(set(map(_own, index or ())) - set(tensors))
    if lacking:
        raise CheckpointError("load_safetensors", f"{path / INDEX} lists {lacking[0]!r}, which is not there.", _AGAIN)
    manifest = manifest_of("safetensors", "", tensors)
    return Source(str(path), manifest, ForeignReader(storage, folder, manifest), OwnNames())


_AGAIN = "Fetch or save it again."


def _own(key: str) -> str:
    return name_of([key])


def _index(storage: Storage, path: Path) -> dict[str, str]:
    try:
        weights = json.loads(read_small(storage, path))["weight_map"]
        return {str(key): plain_name(file) for key, file in weights.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError("load_safetensors", f"{path} is no index: {error}.", _AGAIN) from error


def read_header(storage: Storage, path: Path) -> dict[str, SavedTensor]:
    """The tensors in a safetensors file. Raises CheckpointError when it is none, or cut off."""
    try:
        with storage.open_file(path) as file:
            begin = bytearray(8)
            file.read_at(0, memoryview(begin))
            header_bytes = int.from_bytes(begin, "little")
            if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, file.num_bytes - 8):
                raise ValueError(f"a header of {header_bytes} bytes in a file of {file.num_bytes}")
            header = bytearray(header_bytes)
            file.read_at(8, memoryview(header))
            entries = json.loads(header)
            entries.pop("__metadata__", None)
            if wrong := [key for key in entries if not is_text(key)]:
                raise ValueError(f"the name {wrong[0]!r}")
            data_bytes = file.num_bytes - 8 - header_bytes
        return {key: _tensor(path.name, entry, 8 + header_bytes, data_bytes) for key, entry in entries.items()}
    except FileNotFoundError:
        raise CheckpointError("load_safetensors", f"{path} is missing.", _AGAIN) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError("load_safetensors", f"{path} is no safetensors file: {error}.", _AGAIN) from error


def _tensor(file: str, entry: dict[str, Any], data_offset: int, data_bytes: int) -> SavedTensor:
    dtype, shape, (start, end) = dtype_of_safetensors(entry["dtype"]), entry["shape"], entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise ValueError(f"shape {shape!r} at {start!r} to {end!r}")
    item_bytes = dtype_named(dtype).itemsize
    if not can_be_a_shape(shape, item_bytes):
        raise ValueError(f"shape {shape}, which is no tensor's")
    size = math.prod(shape) * item_bytes
    if end - start != size or end > data_bytes:
        raise ValueError(f"{dtype}{shape} at {start} to {end} of {data_bytes} bytes")
    box = Box.whole(tuple(shape))
    return SavedTensor(box.shape, dtype, (Chunk(file, data_offset + start, size, box, b""),) if size else ())
