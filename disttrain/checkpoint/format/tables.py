"""Tables: the chunks of each data file that the manifest does not list. A load reads the tables of the files it needs.
Torch-free.

A table is zlib over msgpack of columns: names, the bytes between a chunk and the one before it, sizes in bytes,
origins, shapes, and the checksums of all blocks in a row.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgpack
import xxhash

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.manifest import TABLES, Chunk, SavedFile
from disttrain.checkpoint.storage.base import Readable, ReadableFile
from disttrain.errors import CheckpointCorruptError

_FASTEST = 1
_MOST_BYTES = 1 << 30
"""A larger table is none of ours: 10 million chunks."""
_REMEDY = "Load another save; this one was damaged after it was written."


def encode_table(rows: Sequence[tuple[str, Chunk]]) -> bytes:
    """The table of these chunks of one file, in the order of the file; empty for none."""
    if not rows:
        return b""
    names, chunks = zip(*rows, strict=True)
    ends = [0, *(chunk.offset + chunk.num_bytes for chunk in chunks)]
    columns = [
        names,
        [chunk.offset - end for chunk, end in zip(chunks, ends, strict=False)],
        [chunk.num_bytes for chunk in chunks],
        [chunk.box.origin for chunk in chunks],
        [chunk.box.shape for chunk in chunks],
        b"".join(chunk.checksums for chunk in chunks),
    ]
    return zlib.compress(msgpack.packb(columns), _FASTEST)


def checksum_of(table: bytes | bytearray) -> bytes:
    return xxhash.xxh3_64_digest(table)


def decode_table(
    data: bytes | bytearray, file: str, saved: SavedFile, block_bytes: int
) -> dict[str, tuple[Chunk, ...]]:
    """The chunks by name. Raises ValueError for bytes that are no table of this file."""
    unzip = zlib.decompressobj()
    try:
        plain = unzip.decompress(data, _MOST_BYTES)
        names, gaps, sizes, origins, shapes, checksums = msgpack.unpackb(plain)
    except (zlib.error, msgpack.UnpackException, TypeError, ValueError) as error:
        raise ValueError(f"it cannot be unpacked ({error})") from error
    chunks: dict[str, list[Chunk]] = {}
    end = at = 0
    try:
        for (
            name,
            gap,
            num_bytes,
            origin,
            shape,
        ) in zip(names, gaps, sizes, origins, shapes, strict=True):
            box = Box(_counts(origin), _counts(shape))
            offset = end + _count(gap)
            end = offset + _count(num_bytes)
            after = at + 8 * -(-num_bytes // block_bytes)
            if not isinstance(name, str):
                raise ValueError(f"it has the name {str(name)[:40]}")
            chunks.setdefault(name, []).append(Chunk(file, offset, num_bytes, box, checksums[at:after]))
            if offset < saved.header_bytes or end > saved.num_bytes or after > len(checksums):
                raise ValueError(f"the chunk at {offset} is not within the file")
            at = after
    except TypeError as error:
        raise ValueError(f"it misspells {error}") from error
    return {name: tuple(of_name) for name, of_name in chunks.items()}


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"it has the count {str(value)[:40]}")
    return value


def _counts(values: Sequence[object]) -> tuple[int, ...]:
    return tuple(map(_count, values))


class FolderTables:
    """The tables of a save, each read when it is first needed. Satisfies `Tables`."""

    def __init__(self, storage: Readable, folder: Path, files: Mapping[str, SavedFile], block_bytes: int) -> None:
        self._storage = storage
        self._folder = folder
        self._files = {name: file for name, file in files.items() if file.table is not None}
        self._block_bytes = block_bytes
        self._known: dict[str, dict[str, tuple[Chunk, ...]]] = {}

    @property
    def files(self) -> Collection[str]:
        return self._files.keys()

    def need(self, files: Iterable[str]) -> None:
        missing = [file for file in files if file in self._files and file not in self._known]
        if not missing:
            return
        path = self._folder / TABLES
        try:
            with self._storage.open_file(path) as opened:
                for file in missing:
                    self._known[file] = self._read(opened, file)
        except FileNotFoundError:
            raise CheckpointCorruptError("load", f"{path} is missing.", _REMEDY) from None
        except OSError as error:
            remedy = "Load another save, or look after the file system."
            raise CheckpointCorruptError("load", f"{path} cannot be read: {error}.", remedy) from error

    def chunks(self, file: str, name: str) -> tuple[Chunk, ...]:
        return self.of(file).get(name, ())

    def of(self, file: str) -> Mapping[str, tuple[Chunk, ...]]:
        self.need([file])
        return self._known.get(file, {})

    def _read(self, opened: ReadableFile, file: str) -> dict[str, tuple[Chunk, ...]]:
        saved = self._files[file]
        span = saved.table
        assert span is not None
        if span.offset + span.num_bytes > opened.num_bytes:
            problem = f"{self._folder / TABLES} has {opened.num_bytes} bytes, and lacks the table of {file}."
            raise CheckpointCorruptError("load", problem, _REMEDY)
        data = bytearray(span.num_bytes)
        num_read = opened.read_at(span.offset, memoryview(data))
        if num_read < span.num_bytes or checksum_of(data) != span.checksum:
            raise CheckpointCorruptError(
                "load",
                f"{self._folder / TABLES} does not have the table of {file} that was saved, "
                f"in the {span.num_bytes} bytes from offset {span.offset} on.",
                _REMEDY,
            )
        try:
            return decode_table(data, file, saved, self._block_bytes)
        except ValueError as error:
            problem = f"the table of {file} in {self._folder / TABLES} contradicts itself: {error}."
            raise CheckpointCorruptError("load", problem, "Load another save.") from error
