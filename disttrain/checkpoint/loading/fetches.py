"""Fetches: plans the requests for the bytes that a load needs. Pure.

Checksums are of blocks, so whole blocks are read, each once; blocks that are adjacent in a file are read together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from disttrain.checkpoint.format.box import spans
from disttrain.checkpoint.format.dtypes import dtype_named
from disttrain.checkpoint.format.manifest import Chunk
from disttrain.checkpoint.plan import Read

FETCH_BYTES = 8 << 20
"""The most bytes that a request brings, unless a single block is larger."""

_GAP_BYTES = 4096
"""Ranges with smaller gaps are fetched together: disks give whole pages anyway."""


@dataclass(frozen=True)
class Piece:
    """Whole blocks: bytes `start` to `stop` of a chunk, and the reads of that chunk."""

    chunk: Chunk
    start: int
    stop: int
    reads: tuple[Read, ...]

    @property
    def offset(self) -> int:
        """The offset of its first byte in the file."""
        return self.chunk.offset + self.start


@dataclass(frozen=True)
class Fetch:
    """One request for bytes `start` to `stop` of a file, which hold these pieces, in order."""

    file: str
    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def plan_fetches(reads: Sequence[Read], block_bytes: int, max_bytes: int = FETCH_BYTES) -> list[Fetch]:
    """The requests for what `reads`, in the order of files and offsets, bring; no block is in two."""
    fetches: list[Fetch] = []
    run: list[Piece] = []
    for piece in _pieces(reads, block_bytes, max(max_bytes // block_bytes, 1)):
        if run and not _goes_with(run, piece, max_bytes):
            fetches.append(_fetch(run))
            run = []
        run.append(piece)
    return [*fetches, _fetch(run)] if run else fetches


def _goes_with(run: Sequence[Piece], piece: Piece, max_bytes: int) -> bool:
    first, last = run[0], run[-1]
    gap = piece.offset - (last.chunk.offset + last.stop)
    fits = piece.chunk.offset + piece.stop - first.offset <= max_bytes
    return piece.chunk.file == last.chunk.file and 0 <= gap <= _GAP_BYTES and fits


def _fetch(pieces: Sequence[Piece]) -> Fetch:
    first, last = pieces[0], pieces[-1]
    return Fetch(first.chunk.file, first.offset, last.chunk.offset + last.stop, tuple(pieces))


def _pieces(reads: Sequence[Read], block_bytes: int, max_blocks: int) -> Iterator[Piece]:
    for _, of_chunk in itertools.groupby(reads, key=_chunk_of):
        chunk_reads = tuple(of_chunk)
        chunk = chunk_reads[0].chunk
        for first, last in _block_ranges(chunk_reads, block_bytes):
            for begin in range(first, last, max_blocks):
                end = min(begin + max_blocks, last)
                yield Piece(chunk, begin * block_bytes, min(end * block_bytes, chunk.num_bytes), chunk_reads)


def _chunk_of(read: Read) -> tuple[object, ...]:
    """Equal for reads of one chunk; other formats may have several that begin at one place."""
    chunk = read.chunk
    return chunk.file, chunk.offset, chunk.num_bytes, chunk.box, read.dtype


def _block_ranges(reads: Sequence[Read], block_bytes: int) -> list[tuple[int, int]]:
    """The blocks of a chunk that hold what its `reads` want: (first, last + 1), ascending, none twice."""
    chunk = reads[0].chunk
    if any(read.box == chunk.box for read in reads):
        return [(0, -(-chunk.num_bytes // block_bytes))]
    item_size = dtype_named(reads[0].dtype).itemsize
    ranges = itertools.chain.from_iterable(
        spans(chunk.box.shape, read.box.seen_from(chunk.box.origin), block_bytes // item_size) for read in reads
    )
    return _joined(
        (start * item_size // block_bytes, -(-end * item_size // block_bytes)) for start, end in sorted(ranges)
    )


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending ranges without overlaps."""
    joined: list[tuple[int, int]] = []
    for first, last in ranges:
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined
