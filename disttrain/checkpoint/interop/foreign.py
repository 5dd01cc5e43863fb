"""Parts that readers of other formats share: a manifest and a reader without checksums, and chunks with strides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.dtypes import dtype_named
from disttrain.checkpoint.format.manifest import Chunk, Manifest, SavedTensor
from disttrain.checkpoint.interop.joining import JoinedChunk, assembled
from disttrain.checkpoint.interop.torch_zip import StoredTensor, strided
from disttrain.checkpoint.loading.reader import Reader
from disttrain.checkpoint.loading.scattering import Targets
from disttrain.checkpoint.plan import Read
from disttrain.checkpoint.state.tree import name_of
from disttrain.checkpoint.storage.base import ReadableFile
from disttrain.errors import CheckpointError

_BLOCK_BYTES = 1 << 16
"""Reads begin and end at multiples of this; smaller ones would not be worth a request."""


@dataclass(frozen=True)
class StridedChunk(Chunk):
    """A chunk that is not row-major: its elements lie as `strides` say, in elements."""

    strides: tuple[int, ...]


def chunk_of(file: str, stored: StoredTensor) -> Chunk:
    """The chunk that is all of a tensor."""
    box, span = Box.whole(stored.shape), stored.span_bytes
    if stored.is_contiguous:
        return Chunk(file, stored.offset, span, box, b"")
    return StridedChunk(file, stored.offset, span, box, b"", stored.strides)


def manifest_of(
    made_by: str,
    save_id: str,
    tensors: dict[str, SavedTensor],
    values: dict[str, Chunk] | None = None,
    same_as: dict[str, str] | None = None,
) -> Manifest:
    """A manifest of chunks in files of unknown sizes."""
    return Manifest(save_id, 1, made_by, {}, tensors, values or {}, {}, same_as or {}, block_bytes=_BLOCK_BYTES)


class ForeignReader(Reader):
    """Reads chunks that have no checksums, from files of any size."""

    can_share = False

    def read_values(self, chunks: Mapping[str, Chunk]) -> dict[str, Any]:
        whole = {name: chunk for name, chunk in chunks.items() if not isinstance(chunk, JoinedChunk)}
        values = super().read_values(whole)
        for name, chunk in chunks.items():
            if isinstance(chunk, JoinedChunk):
                pieces = dict(chunk.pieces)
                read = super().read_values({name_of(keys): piece for keys, piece in pieces.items()})
                values[name] = assembled({keys: read[name_of(keys)] for keys in pieces})
        return values

    @contextmanager
    def opened(self, name: str) -> Iterator[ReadableFile]:
        with ExitStack() as stack:
            with self.readable(name):
                file = stack.enter_context(self.storage.open_file(self.folder / name))
            yield file

    def read_tensors(self, reads: Sequence[Read], targets: Targets) -> None:
        located = self._located(reads)
        super().read_tensors([read for read in located if not isinstance(read.chunk, StridedChunk)], targets)
        strided_reads = [read for read in located if isinstance(read.chunk, StridedChunk)]
        for file_name, of_file in itertools.groupby(strided_reads, key=lambda read: read.chunk.file):
            with self.opened(file_name) as file:
                for read in of_file:
                    self._read_strided(file, read, targets[read.name][read.wanted])

    def _located(self, reads: Sequence[Read]) -> Sequence[Read]:
        """The same reads, with the chunks that hold the elements and nothing else."""
        return reads

    def _read_strided(self, file: ReadableFile, read: Read, local: torch.Tensor) -> None:
        chunk = read.chunk
        assert isinstance(chunk, StridedChunk)
        data = np.empty(chunk.num_bytes, np.uint8)
        if file.read_at(chunk.offset, data.data) < len(data):
            raise CheckpointError("load", f"{read.name!r} in {self.folder / chunk.file} ends early.", "Load another.")
        whole = strided(data, StoredTensor(chunk.offset, dtype_named(read.dtype), chunk.box.shape, chunk.strides))
        part = whole[read.box.seen_from(chunk.box.origin).slices()]
        local[read.box.seen_from(read.wanted.origin).slices()].copy_(part)
