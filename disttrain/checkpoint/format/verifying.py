"""Verifying a save: every byte of it against its checksum, in parallel; each file is opened once. Torch-free."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from disttrain.checkpoint.format.manifest import (
    Chunk,
    Manifest,
    SavedFile,
    SavedTensor,
    Tables,
    block_checksums,
    file_name,
)
from disttrain.checkpoint.format.rules import listed_chunks, of_all_chunks, of_file_rows
from disttrain.checkpoint.storage.base import ReadableFile, Storage
from disttrain.checkpoint.storage.open_files import OpenFiles
from disttrain.errors import CheckpointCorruptError

_RUN_BYTES = 8 << 20
"""The most bytes that a thread reads at once; whole blocks."""


class _Piece(NamedTuple):
    """Some whole blocks of what is saved as `name`."""

    name: str
    offset: int
    num_bytes: int
    checksums: bytes


@dataclass(frozen=True)
class _Run:
    """Pieces of a file that are read at once."""

    file: str
    pieces: Sequence[_Piece]

    @property
    def num_bytes(self) -> int:
        return self.pieces[-1].offset + self.pieces[-1].num_bytes - self.pieces[0].offset


class _WrongSizeError(Exception):
    """A file has another size than was saved."""


def find_damage(
    storage: Storage,
    folder: Path,
    manifest: Manifest,
    advance: Callable[[int], None] = lambda num_bytes: None,
    num_threads: int | None = None,
) -> list[str]:
    """A sentence for each file or block that is missing or differs from what was saved; none if all is well.

    `advance` is told, by any thread, how many more bytes have been read.
    """
    damage, chunks = _gathered(manifest)
    runs = [run for name, file in manifest.files.items() for run in _runs(name, file, chunks[name], manifest)]
    broken: dict[str, str] = {}
    mutex = threading.Lock()
    local = threading.local()  # a thread's buffer is used again: fresh memory costs as much as reading

    @contextmanager
    def opened(name: str) -> Iterator[ReadableFile]:
        with storage.open_file(folder / name) as file:
            if file.num_bytes != manifest.files[name].num_bytes:
                raise _WrongSizeError(
                    f"{name} has {file.num_bytes} bytes, {manifest.files[name].num_bytes} were saved."
                )
            yield file

    def check(run: _Run) -> list[str]:
        if run.file in broken:
            return []
        if len(getattr(local, "buffer", b"")) < run.num_bytes:
            local.buffer = bytearray(run.num_bytes)
        try:
            with files.use(run.file) as file:
                sentences = _wrong_blocks(file, run, manifest.block_bytes, memoryview(local.buffer)[: run.num_bytes])
        except FileNotFoundError:
            sentence = f"{run.file} is missing."
        except _WrongSizeError as error:
            sentence = str(error)
        except OSError as error:
            sentence = f"{run.file} cannot be read: {error}."
        else:
            advance(run.num_bytes)
            return sentences
        with mutex:
            return [sentence] if broken.setdefault(run.file, sentence) is sentence else []

    with (
        OpenFiles(opened, [run.file for run in runs]) as files,
        ThreadPoolExecutor(num_threads or min(16, 2 * (os.cpu_count() or 1))) as threads,
    ):
        for sentences in threads.map(check, runs):
            damage += sentences
    return damage


def total_bytes(manifest: Manifest) -> int:
    """The number of bytes of the data files."""
    return sum(file.num_bytes for file in manifest.files.values())


def _gathered(manifest: Manifest) -> tuple[list[str], Mapping[str, list[tuple[str, Chunk]]]]:
    """Sentences on what tables have wrong, and all chunks of each file in its order, with what they are part of."""
    chunks: dict[str, list[tuple[str, Chunk]]] = {name: [] for name in manifest.files}
    for name, chunk in listed_chunks(manifest):
        chunks[chunk.file].append((name, chunk))
    damage: list[str] = []
    tables = manifest.tables
    try:
        if tables is not None:
            tables.need(tables.files)
            for file in tables.files:
                chunks[file] += [(name, chunk) for name, of_name in tables.of(file).items() for chunk in of_name]
            damage += _misplaced(manifest, tables)
    except CheckpointCorruptError as error:
        damage.append(error.problem)
    else:
        for name, tensor in manifest.tensors.items():
            if not isinstance(tensor, SavedTensor):
                damage += [f"{sentence}." for sentence in of_all_chunks(name, tensor)]
    for name, of_file in chunks.items():
        of_file.sort(key=lambda item: item[1].offset)
        rows = [(name, chunk.offset, chunk.num_bytes, len(chunk.checksums)) for _, chunk in of_file]
        damage += [f"{each}." for each in of_file_rows(name, manifest.files[name], rows, manifest.block_bytes)]
    return damage, chunks


def _misplaced(manifest: Manifest, tables: Tables) -> Iterator[str]:
    """Lists what tables have and the manifest lacks, and the values per rank that they lack."""
    expected = {name for name, tensor in manifest.tensors.items() if not isinstance(tensor, SavedTensor)}
    owners = {name: by_rank for name, by_rank in manifest.per_rank.items() if not isinstance(by_rank, dict)}
    expected.update(owners)
    for file in tables.files:
        for name in tables.of(file):
            if name not in expected:
                yield f"the table of {file} has a chunk of {name!r}, which is not in the manifest."
    for name, by_rank in owners.items():
        for rank in by_rank:
            if len(tables.chunks(file_name(rank), name)) != 1:
                yield f"the table of {file_name(rank)} lacks the value {name!r}."


def _runs(name: str, file: SavedFile, chunks: Sequence[tuple[str, Chunk]], manifest: Manifest) -> Iterator[_Run]:
    """All of a file, so that adjacent pieces are read together; at least one run, so that the file is opened."""
    run = [_Piece("the header", 0, file.header_bytes, file.header_checksums)]
    for piece in (piece for what, chunk in chunks for piece in _pieces(what, chunk, manifest.block_bytes)):
        end = run[-1].offset + run[-1].num_bytes
        if piece.offset != end or piece.offset + piece.num_bytes - run[0].offset > _RUN_BYTES:
            yield _Run(name, run)
            run = []
        run.append(piece)
    yield _Run(name, run)


def _pieces(name: str, chunk: Chunk, block_bytes: int) -> Iterator[_Piece]:
    blocks = max(1, _RUN_BYTES // block_bytes)
    for first in range(0, len(chunk.checksums) // 8, blocks):
        start = first * block_bytes
        num_bytes = min(blocks * block_bytes, chunk.num_bytes - start)
        yield _Piece(name, chunk.offset + start, num_bytes, chunk.checksums[first * 8 : (first + blocks) * 8])


def _wrong_blocks(file: ReadableFile, run: _Run, block_bytes: int, buffer: memoryview) -> list[str]:
    begin = run.pieces[0].offset
    num_read = file.read_at(begin, buffer)
    damage = []
    for piece in run.pieces:
        start = piece.offset - begin
        data = buffer[start : start + piece.num_bytes]
        checksums = block_checksums(data, block_bytes)
        if checksums == piece.checksums and start + piece.num_bytes <= num_read:
            continue
        saved = piece.checksums
        wrong = [at // 8 for at in range(0, len(checksums), 8) if checksums[at : at + 8] != saved[at : at + 8]]
        wrong = wrong or [max(num_read - start, 0) // block_bytes]
        damage += [
            f"{run.file} does not have the bytes of {piece.name!r} that were saved, "
            f"in the {block_bytes} bytes from offset {piece.offset + block * block_bytes} on."
            for block in wrong
        ]
    return damage
