"""Describes a data file before it is written: its header, and the position of each chunk. Torch-free.

The same `Image` describes a file that streams from tensors and one that lies ready in memory, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.manifest import BLOCK_BYTES, Chunk, SavedFile, block_checksums
from disttrain.checkpoint.format.tables import encode_table

_DATA_ALIGNMENT = 4096
"""The data begin at a multiple of it, so that they can be mapped and read with direct I/O."""

SLICE_BYTES = 16 * BLOCK_BYTES
"""The bytes of a chunk that are passed on at once: whole blocks."""


Kind = Literal["part", "tensor", "value", "own"]
"""Of a chunk: part of a tensor that a mesh cuts; a tensor that the manifest lists, or a piece of it; a value; a value
of this rank's own. The first and the last are in the file's table, the others in the manifest."""


class Entry(NamedTuple):
    """A tensor's part or a value that becomes one chunk; `dtype` and `shape` stand in the file's own header."""

    name: str
    box: Box
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]
    kind: Kind


class Extent(NamedTuple):
    """The bytes of the file that hold a chunk."""

    name: str
    box: Box
    kind: Kind
    offset: int
    num_bytes: int

    def of(self, file: memoryview) -> Iterator[memoryview]:
        """The bytes of this extent in the file, as `slices`."""
        return slices(file[self.offset : self.offset + self.num_bytes])


@dataclass(frozen=True)
class Image:
    """One rank's file: `header`, and after it the chunks one by one."""

    header: bytes
    extents: Sequence[Extent]

    @property
    def num_bytes(self) -> int:
        return self.extents[-1].offset + self.extents[-1].num_bytes if self.extents else len(self.header)

    def parts(
        self, file: str, data_of: Callable[[int], Iterable[memoryview]], written: Written
    ) -> Iterator[memoryview]:
        """The file's parts, entering each chunk in `written` as it goes by; `data_of` has the `slices` of each place.

        A slice's checksums are computed before it is passed on, so that one slice is written while the next is hashed.
        """
        yield memoryview(self.header)
        for number, extent in enumerate(self.extents):
            checksums = []
            for data in data_of(number):
                checksums.append(block_checksums(data, BLOCK_BYTES))
                yield data
            chunk = Chunk(file, extent.offset, extent.num_bytes, extent.box, b"".join(checksums))
            written.rows_of(extent.kind).append((extent.name, chunk))

    def saved_file(self) -> SavedFile:
        return SavedFile(self.num_bytes, len(self.header), block_checksums(memoryview(self.header), BLOCK_BYTES))

    def to_plain(self) -> list[Any]:
        return [self.header, [[name, *box_row(box), *rest] for name, box, *rest in self.extents]]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Image:
        header, rows = plain
        return cls(header, [Extent(name, box_of(origin, shape), *rest) for name, origin, shape, *rest in rows])


def slices(data: memoryview) -> Iterator[memoryview]:
    """A chunk's bytes, `SLICE_BYTES` at once."""
    for start in range(0, len(data), SLICE_BYTES):
        yield data[start : start + SLICE_BYTES]


def make_image(entries: Sequence[Entry], metadata: Mapping[str, str]) -> Image:
    """The file of these entries in this order, which has larger elements first: each tensor then begins at a multiple
    of its element's size, without any gap."""
    offsets = [0]
    for entry in entries:
        offsets.append(offsets[-1] + entry.num_bytes)
    header = _header(entries, offsets, metadata)
    return Image(
        header,
        [
            Extent(entry.name, entry.box, entry.kind, len(header) + offset, entry.num_bytes)
            for entry, offset in zip(entries, offsets, strict=False)
        ],
    )


def _header(entries: Sequence[Entry], offsets: Sequence[int], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON, padded with spaces."""
    content: dict[str, Any] = {"__metadata__": dict(metadata)}
    for entry, offset in zip(entries, offsets, strict=False):
        span = [offset, offset + entry.num_bytes]
        content[_key(entry)] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": span}
    text = json.dumps(content, separators=(",", ":")).encode()
    size = -(-(8 + len(text)) // _DATA_ALIGNMENT) * _DATA_ALIGNMENT
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)


def _key(entry: Entry) -> str:
    """The name; for a part that does not begin at the tensor's origin, with where it begins."""
    return entry.name + ("@" + ",".join(map(str, entry.box.origin)) if any(entry.box.origin) else "")


@dataclass(frozen=True)
class Written:
    """The results of one rank's writing: its file, and the chunks of each tensor and value in it; in `rows` those that
    its table has."""

    file: SavedFile | None = None
    parts: list[tuple[str, Chunk]] = field(default_factory=list)
    values: list[tuple[str, Chunk]] = field(default_factory=list)
    rows: list[tuple[str, Chunk]] = field(default_factory=list)

    def rows_of(self, kind: Kind) -> list[tuple[str, Chunk]]:
        return {"tensor": self.parts, "value": self.values}.get(kind, self.rows)

    def to_plain(self) -> list[Any]:
        """Plain values for rank 0, which knows the file's name from the rank."""
        file = None if self.file is None else [self.file.num_bytes, self.file.header_bytes, self.file.header_checksums]
        listed = [[_row(name, chunk) for name, chunk in kind] for kind in (self.parts, self.values)]
        return [file, *listed, encode_table(self.rows)]


class Report(NamedTuple):
    """The same as rank 0 has it, which does not look into the table."""

    file: SavedFile | None
    parts: list[tuple[str, Chunk]]
    values: list[tuple[str, Chunk]]
    table: bytes

    @classmethod
    def from_plain(cls, plain: list[Any], file_name: str) -> Report:
        file, parts, values, table = plain
        return cls(
            None if file is None else SavedFile(*file),
            [_chunk(row, file_name) for row in parts],
            [_chunk(row, file_name) for row in values],
            table,
        )


def box_row(box: Box) -> list[list[int]]:
    return [list(box.origin), list(box.shape)]


def box_of(origin: Sequence[int], shape: Sequence[int]) -> Box:
    return Box(tuple(origin), tuple(shape))


def _row(name: str, chunk: Chunk) -> list[Any]:
    return [name, chunk.offset, chunk.num_bytes, *box_row(chunk.box), chunk.checksums]


def _chunk(row: list[Any], file: str) -> tuple[str, Chunk]:
    name, offset, num_bytes, origin, shape, checksums = row
    return name, Chunk(file, offset, num_bytes, box_of(origin, shape), checksums)
