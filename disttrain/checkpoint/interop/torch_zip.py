"""The files of torch.save: a zip with a pickle that describes the content, and the bytes of each storage.

The pickle is read as data (`disttrain._python.pickles`), so nothing that it names is run, and the bytes of a tensor can
be read where they lie, in parts. The format is that of torch's own `torch/serialization.py`.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from disttrain._python.pickles import Made, Map, Name, Persistent, parse
from disttrain.checkpoint.format.dtypes import dtype_name
from disttrain.checkpoint.format.rules import can_be_a_shape
from disttrain.checkpoint.interop.pickle_writing import dumps
from disttrain.checkpoint.storage.base import ReadableFile
from disttrain.errors import CheckpointError

_STORAGES = {
    "BFloat16Storage": "bfloat16",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "ShortStorage": "int16",
}
_REBUILD_V2 = Name("torch._utils", "_rebuild_tensor_v2")
_REBUILD_V3 = Name("torch._utils", "_rebuild_tensor_v3")
_PARAMETER = Name("torch._utils", "_rebuild_parameter")
_ORDERED_DICT = Name("collections", "OrderedDict")
_ENCODE = Name("_codecs", "encode")
_SIZE = Name("torch", "Size")
_SETS = [Name(module, kind) for module in ("builtins", "__builtin__") for kind in ("set", "frozenset")]
_MAX_KNOWN = 1000
_REMEDY = "Save it again with torch.save, of plain values and tensors."


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's bytes in the file: its first element at byte `offset`, the others as `strides` (elements) say."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span_bytes(self) -> int:
        """The bytes from the first element to the last; 0 where there is none."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        steps = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        sizes = zip(self.shape, self.strides, steps, strict=True)
        return all(size <= 1 or stride == step for size, stride, step in sizes)


class Archive:
    """One torch.save file: `length` bytes of `file` from `offset` on. Pickles in `known` are not parsed again."""

    def __init__(
        self, file: ReadableFile, offset: int, length: int, where: str, parsed: dict[bytes, Any] | None = None
    ) -> None:
        self._where, self._offset = where, offset
        window = io.BufferedReader(_Window(file, offset, length), 1 << 12)
        try:
            with zipfile.ZipFile(window) as archive:
                self._members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                pickled = archive.read(self._members["data.pkl"])
                self.root = parsed[pickled] if parsed and pickled in parsed else parse(pickled)
                order = archive.read(self._members["byteorder"]) if "byteorder" in self._members else b"little"
        except (
            zipfile.BadZipFile,
            zlib.error,
            KeyError,
            ValueError,
            OSError,
            NotImplementedError,
            RuntimeError,
        ) as error:
            raise self._refused(f"is no whole file of torch.save: {error}") from error
        if order != b"little":
            raise self._refused("was saved on a big-endian machine")
        self._window, self._length = window, length
        if parsed is not None and len(parsed) < _MAX_KNOWN:
            parsed[pickled] = self.root

    def tensor(self, node: Any) -> StoredTensor | None:
        """The tensor that a part of the pickle is; None where it is none."""
        if isinstance(node, Made) and node.what == _PARAMETER:
            return self.tensor(node.args[0])
        if not isinstance(node, Made) or node.what not in (_REBUILD_V2, _REBUILD_V3):
            return None
        try:
            storage, start, shape, strides = node.args[:4]
            _, kind, key, _, num_elements = storage.key
            dtype = _dtype(node.args[6] if node.what == _REBUILD_V3 else Name("torch", _STORAGES[kind.name]))
            if any(node.args[6 + (node.what == _REBUILD_V3) :]):
                raise ValueError("a conjugated or negated view")
            item_bytes = 1 if node.what == _REBUILD_V3 else dtype.itemsize
            info = self._members[f"data/{key}"]
            sizes = (*shape, *strides, start, num_elements)
            are_sizes = len(shape) == len(strides) and all(type(size) is int and size >= 0 for size in sizes)
            if not are_sizes or not can_be_a_shape(shape, dtype.itemsize):
                raise ValueError(f"shape {shape}, strides {strides}")
            begin = self._data_offset(info)
            stored = StoredTensor(begin + start * dtype.itemsize, dtype, tuple(shape), tuple(strides))
            end = start * dtype.itemsize + stored.span_bytes
            if info.compress_type != zipfile.ZIP_STORED or end > min(info.file_size, num_elements * item_bytes):
                raise ValueError(f"{end} bytes of {info.file_size}")
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise self._refused(f"has a tensor that cannot be: {error}") from error
        return stored

    def plain(self, node: Any, tensor_of: Any) -> Any:
        """A part of the pickle as plain values, with `tensor_of(StoredTensor)` for tensors.

        Raises CheckpointError, naming it, for whatever else the pickle would make.
        """
        try:
            return self._plain(node, tensor_of)
        except (RecursionError, TypeError, ValueError, LookupError) as error:
            raise self._refused(f"has values that cannot be: {error}") from error

    def _plain(self, node: Any, tensor_of: Any) -> Any:
        if isinstance(node, Map):
            return {self._plain(key, tensor_of): self._plain(value, tensor_of) for key, value in node}
        if isinstance(node, list | tuple):
            return type(node)(self._plain(item, tensor_of) for item in node)
        if isinstance(node, Name):
            return _dtype(node)
        if isinstance(node, bytearray):
            return bytes(node)
        if not isinstance(node, Made | Persistent):
            return node
        stored = self.tensor(node)
        if stored is not None:
            return tensor_of(stored)
        target = node.what if isinstance(node, Made) else node
        if isinstance(node, Made):
            if target == _ORDERED_DICT:
                return self._plain(Map(node.items or []), tensor_of)
            if target == _SIZE:
                return tuple(node.args[0])
            if target == _ENCODE and isinstance(node.args[0], str):
                return node.args[0].encode("latin1")
            if target in _SETS:
                return self._plain(sorted(node.items or (node.args or [()])[0]), tensor_of)
        raise self._refused(f"would run {target}, which is neither a plain value nor a tensor")

    def tensor_in_memory(self, stored: StoredTensor) -> torch.Tensor:
        """A tensor with its values."""
        self._window.seek(stored.offset - self._offset)
        data = self._window.read(stored.span_bytes)
        return strided(np.frombuffer(bytearray(data), np.uint8), stored)

    def _data_offset(self, info: zipfile.ZipInfo) -> int:
        """The offset of a member's bytes: after a local header, whose lengths may differ from the directory's."""
        self._window.seek(info.header_offset)
        header = self._window.read(30)
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        begin = info.header_offset + 30 + lengths
        if header[:4] != b"PK\x03\x04" or begin + info.file_size > self._length:
            raise ValueError(f"a broken header at {info.header_offset}")
        return self._offset + begin

    def _refused(self, problem: str) -> CheckpointError:
        return CheckpointError("load", f"{self._where} {problem}.", _REMEDY)


def strided(data: np.ndarray[Any, Any], stored: StoredTensor) -> torch.Tensor:
    """The tensor in the bytes from its first element on; it shares memory with them."""
    if 0 in stored.shape:
        return torch.empty(stored.shape, dtype=stored.dtype)
    return torch.from_numpy(data).view(stored.dtype).as_strided(stored.shape, stored.strides)


class _Window(io.RawIOBase):
    """Part of a file, for `zipfile`."""

    def __init__(self, file: ReadableFile, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if at < 0:
            raise ValueError(f"offset {at}")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        num_read = self._file.read_at(self._offset + self._at, view) if len(view) else 0
        self._at += num_read
        return num_read


def _dtype(name: Name) -> torch.dtype:
    dtype = getattr(torch, name.name, None) if name.module == "torch" else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError("load", f"the pickle would run {name}, which is no dtype.", _REMEDY)
    return dtype


def archive_of(value: Any) -> bytes:
    """The file that torch.save would write of a value, and that torch.load reads. Raises CheckpointError for what is
    not plain."""
    storages: list[torch.Tensor] = []
    root = dumps(_pickled(value, storages))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, buffer, "data.pkl", root)
        _add(archive, buffer, "byteorder", b"little")
        for number, tensor in enumerate(storages):
            _add(archive, buffer, f"data/{number}", tensor.view(-1).view(torch.uint8).numpy().data)
        _add(archive, buffer, "version", b"3\n")
    return buffer.getvalue()


def _add(archive: zipfile.ZipFile, buffer: io.BytesIO, name: str, data: bytes | memoryview) -> None:
    """A member whose bytes begin at a multiple of 64, as torch maps them."""
    info = zipfile.ZipInfo(f"archive/{name}")
    begin = buffer.tell() + 30 + len(info.filename) + 4
    padding = -begin % 64
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    archive.writestr(info, data)


def _pickled(value: Any, storages: list[torch.Tensor]) -> Any:
    if isinstance(value, dict):
        return Map([(_pickled(key, storages), _pickled(item, storages)) for key, item in value.items()])
    if type(value) in (list, tuple):
        return type(value)(_pickled(item, storages) for item in value)
    if isinstance(value, torch.dtype):
        return Name("torch", dtype_name(value))
    if not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    names = {dtype: storage for storage, dtype in _STORAGES.items()}
    name, key = names.get(dtype_name(tensor.dtype)), str(len(storages))
    storages.append(tensor)
    size = tensor.numel() if name else tensor.numel() * tensor.itemsize
    kind = Name("torch", name) if name else Name("torch.storage", "UntypedStorage")
    storage = Persistent(("storage", kind, key, "cpu", size))
    args = (storage, 0, tuple(tensor.shape), tuple(tensor.stride()), False, Made(_ORDERED_DICT, ()))
    if name:
        return Made(_REBUILD_V2, args)
    return Made(_REBUILD_V3, (*args, Name("torch", dtype_name(tensor.dtype))))
