"""Tensors whose chunks a manifest does not list: it says how they lie on ranks, and the tables of files say the rest.
Torch-free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.layout import Layout, Runs, index_of, num_ranks
from disttrain.checkpoint.format.manifest import Chunk, Tables, file_name
from disttrain.checkpoint.format.rules import ITEM_BYTES, of_chunks
from disttrain.errors import CheckpointCorruptError


@dataclass(frozen=True)
class Spread:
    """A layout, and which of the holders of each part have written it: `count` in a row from position `first` on, in
    a circle."""

    layout: Layout
    first: int
    count: int

    def writers(self, shape: tuple[int, ...], box: Box) -> Iterator[int]:
        """The ranks that may have written elements of `box`."""
        num_holders = self.layout.num_holders
        for coordinate in self.layout.coordinates_near(shape, box):
            for turn in range(self.count):
                yield self.layout.holder(coordinate, (self.first + turn) % num_holders)


@dataclass(frozen=True)
class SpreadTensor:
    """A tensor whose chunks are found as they are needed; `name`: that in the tables. Satisfies `TensorEntry`."""

    shape: tuple[int, ...]
    dtype: str
    name: str
    spread: Spread
    tables: Tables | None = field(default=None, compare=False, repr=False)

    @property
    def num_bytes(self) -> int:
        item_bytes = ITEM_BYTES.get(self.dtype)
        if item_bytes is None:  # newer than this disttrain
            return sum(chunk.num_bytes for chunk in self.chunks)
        return math.prod(self.shape) * item_bytes

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All of them, from all tables."""
        tables = self._tables
        tables.need(tables.files)
        chunks = [chunk for file in tables.files for chunk in tables.chunks(file, self.name)]
        return tuple(sorted(self._checked(chunks), key=lambda chunk: chunk.box))

    @property
    def boxes(self) -> list[Box]:
        return [chunk.box for chunk in self.chunks]

    def chunks_near(self, box: Box) -> Sequence[Chunk]:
        """Reads the tables of those files alone that may have elements of the box."""
        tables = self._tables
        listed = tables.files
        # Of more writers than files: a manifest that was not written so.
        writers = itertools.islice(self.spread.writers(self.shape, box), 4 * len(listed) + 1)
        files = dict.fromkeys(map(file_name, writers))
        names = [file for file in files if file in listed] if len(files) <= len(listed) else [*listed]
        tables.need(names)
        return self._checked([chunk for file in names for chunk in tables.chunks(file, self.name)])

    def _checked(self, chunks: list[Chunk]) -> list[Chunk]:
        problem = next(of_chunks(self.name, self.shape, self.dtype, chunks), None)
        if problem is not None:
            raise CheckpointCorruptError("load", f"a table contradicts itself: {problem}.", "Load another save.")
        return chunks

    @property
    def _tables(self) -> Tables:
        assert self.tables is not None, "a manifest without its folder"
        return self.tables


@dataclass(frozen=True)
class RankChunks(Mapping[int, Chunk]):
    """A value per rank: the ranks that have saved one, each in its own file."""

    name: str
    ranks: Runs
    tables: Tables | None = field(default=None, compare=False, repr=False)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self.ranks)

    def __len__(self) -> int:
        return num_ranks(self.ranks)

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and index_of(self.ranks, rank) is not None

    def __getitem__(self, rank: int) -> Chunk:
        if rank not in self:
            raise KeyError(rank)
        assert self.tables is not None, "a manifest without its folder"
        chunks = self.tables.chunks(file_name(rank), self.name)
        if len(chunks) != 1:
            problem = f"the table of {file_name(rank)} has {len(chunks)} chunks of the value {self.name!r}."
            raise CheckpointCorruptError("load", problem, "Load another save.")
        return chunks[0]
