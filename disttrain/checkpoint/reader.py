"""Reading: the blocks that hold what is wanted, each verified, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from disttrain.checkpoint.box import Box, spans
from disttrain.checkpoint.dtypes import dtype_named
from disttrain.checkpoint.manifest import Chunk, Manifest, block_checksums
from disttrain.checkpoint.plan import Read
from disttrain.checkpoint.storage import Readable, ReadableFile
from disttrain.errors import CheckpointCorruptError, CheckpointError
from disttrain.process_group.packing import unpack

_BUFFER_BYTES = 64 << 20
"""How much is read at once before it goes to its tensor."""


class Reader:
    """Reads from one save; CheckpointCorruptError, naming file, tensor and offset, for bytes that were not saved."""

    def __init__(self, storage: Readable, folder: Path, manifest: Manifest) -> None:
        self.storage = storage
        self.folder = folder
        self._manifest = manifest

    def read_tensors(self, reads: Sequence[Read], targets: Mapping[str, Mapping[Box, torch.Tensor]]) -> None:
        """Fill the targets, local tensors by where in the whole they lie, from `reads` in the order of files."""
        for file_name, of_file in itertools.groupby(reads, key=lambda read: read.chunk.file):
            with self.opened(file_name) as file:
                for read in of_file:
                    self.read(file, read, targets[read.name][read.wanted])

    def read_values(self, chunks: Mapping[str, Chunk]) -> dict[str, Any]:
        """The values in these chunks, by the same names."""
        values = {}
        in_order = sorted(chunks.items(), key=lambda item: (item[1].file, item[1].offset))
        for file_name, of_file in itertools.groupby(in_order, key=lambda item: item[1].file):
            with self.opened(file_name) as file:
                for name, chunk in of_file:
                    data = np.empty(chunk.num_bytes, np.uint8)
                    self._read_blocks(file, name, chunk, 0, data.data)
                    values[name] = self.unpacked(file_name, name, data.tobytes())
        return values

    def unpacked(self, file_name: str, name: str, data: bytes) -> Any:
        """The value that was packed."""
        try:
            return unpack(data)
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                "load",
                f"the value {name!r} of {self.folder / file_name} cannot be unpacked: {type(error).__name__} {error}.",
                f"Use what wrote it: {self._manifest.made_by}.",
            ) from error

    @contextmanager
    def opened(self, name: str) -> Iterator[ReadableFile]:
        saved = self._manifest.files[name]
        with ExitStack() as stack:
            try:
                file = stack.enter_context(self.storage.open_file(self.folder / name))
            except FileNotFoundError:
                raise CheckpointCorruptError("load", f"{self.folder / name} is missing.", _REMEDY) from None
            if file.num_bytes != saved.num_bytes:
                raise CheckpointCorruptError(
                    "load", f"{self.folder / name} has {file.num_bytes} bytes, {saved.num_bytes} were saved.", _REMEDY
                )
            header = Chunk(name, 0, saved.header_bytes, Box((), ()), saved.header_checksums)
            self._read_blocks(file, "the header", header, 0, memoryview(bytearray(saved.header_bytes)))
            yield file

    def read(self, file: ReadableFile, read: Read, local: torch.Tensor) -> None:
        """Fill `local`, this rank's memory of the box `read.wanted`, with what `read` brings."""
        chunk, dtype = read.chunk, dtype_named(read.dtype)
        for part in read.box.split(_BUFFER_BYTES // dtype.itemsize):
            values = self._read_part(file, read.name, chunk, part.seen_from(chunk.box.origin), dtype)
            local[part.seen_from(read.wanted.origin).slices()].copy_(values)

    def _read_part(self, file: ReadableFile, name: str, chunk: Chunk, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """The elements in `box`, counted from the chunk's beginning."""
        block_bytes = self._manifest.block_bytes
        shape = chunk.box.shape or (1,)
        row_bytes = chunk.num_bytes // shape[0]
        first_row, num_rows = (box.origin[0], box.shape[0]) if box.shape else (0, 1)
        # The buffer begins with a block and spans whole rows; pages of blocks that are not read stay untouched.
        begin = first_row * row_bytes // block_bytes * block_bytes
        end = (first_row + num_rows) * row_bytes
        buffer = np.empty(min(-(-end // block_bytes) * block_bytes, chunk.num_bytes) - begin, np.uint8)
        for first, last in _block_ranges(chunk.box.shape, box, dtype.itemsize, block_bytes):
            start, stop = first * block_bytes, min(last * block_bytes, chunk.num_bytes)
            self._read_blocks(file, name, chunk, start, buffer[start - begin : stop - begin].data)
        rows = torch.from_numpy(buffer[first_row * row_bytes - begin : end - begin]).view(dtype)
        if not box.shape:
            return rows.view(())
        return rows.view(num_rows, *shape[1:])[(slice(None), *box.slices()[1:])]

    def _read_blocks(self, file: ReadableFile, name: str, chunk: Chunk, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with whole blocks of the chunk from byte `start` on."""
        block_bytes = self._manifest.block_bytes
        num_read = file.read_at(chunk.offset + start, buffer)
        if not chunk.checksums and num_read == len(buffer):  # of a format that has none
            return
        found = block_checksums(buffer, block_bytes)
        first = start // block_bytes * 8
        saved = chunk.checksums[first : first + len(found)]
        if found == saved and num_read == len(buffer):
            return
        wrong = next((at for at in range(0, len(found), 8) if found[at : at + 8] != saved[at : at + 8]), 0)
        offset = chunk.offset + start + wrong // 8 * block_bytes
        raise CheckpointCorruptError(
            "load",
            f"{self.folder / chunk.file} does not have the bytes of {name!r} that were saved, "
            f"in the {block_bytes} bytes from offset {offset} on.",
            _REMEDY,
        )


_REMEDY = "Load another save; this one was damaged after it was written."


def _block_ranges(shape: tuple[int, ...], box: Box, item_size: int, block_bytes: int) -> list[tuple[int, int]]:
    """Which blocks of a chunk of `shape` hold the elements in `box`: (first, last + 1), ascending, none twice."""
    ranges: list[tuple[int, int]] = []
    for start, end in spans(shape, box, block_bytes // item_size):
        first, last = start * item_size // block_bytes, -(-end * item_size // block_bytes)
        if ranges and first <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], last)
        else:
            ranges.append((first, last))
    return ranges
