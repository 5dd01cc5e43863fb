"""Verifying a save: every byte of it against its checksum, in parallel. Torch-free."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.manifest import Chunk, Manifest, block_checksums
from disttrain.checkpoint.storage.base import Storage

_PIECE_BYTES = 8 << 20
"""The most bytes that a thread reads at once; whole blocks."""


@dataclass(frozen=True)
class _Piece:
    """Some whole blocks of what is saved as `name`."""

    name: str
    chunk: Chunk


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
    damage: list[str] = []
    whole = []
    for name, saved in manifest.files.items():
        try:
            with storage.open_file(folder / name) as file:
                found_bytes = file.num_bytes
        except FileNotFoundError:
            damage.append(f"{name} is missing.")
            continue
        except OSError as error:
            damage.append(f"{name} cannot be read: {error}.")
            continue
        if found_bytes == saved.num_bytes:
            whole.append(name)
        else:
            damage.append(f"{name} has {found_bytes} bytes, {saved.num_bytes} were saved.")
    pieces = [piece for piece in _pieces(manifest) if piece.chunk.file in whole]

    local = threading.local()  # a thread's buffer is used again: fresh memory costs as much as reading

    def check(piece: _Piece) -> list[str]:
        if len(getattr(local, "buffer", b"")) < piece.chunk.num_bytes:
            local.buffer = bytearray(piece.chunk.num_bytes)
        buffer = memoryview(local.buffer)[: piece.chunk.num_bytes]
        damage = _wrong_blocks(storage, folder, piece, manifest.block_bytes, buffer)
        advance(piece.chunk.num_bytes)
        return damage

    with ThreadPoolExecutor(num_threads or min(16, 2 * (os.cpu_count() or 1))) as threads:
        for sentences in threads.map(check, pieces):
            damage += sentences
    return damage


def total_bytes(manifest: Manifest) -> int:
    """The number of bytes that have checksums."""
    return sum(piece.chunk.num_bytes for piece in _pieces(manifest))


def all_chunks(manifest: Manifest) -> Iterator[tuple[str, Chunk]]:
    """Every chunk, with the name of what it is part of."""
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            yield name, chunk
    yield from manifest.values.items()
    for name, by_rank in manifest.per_rank.items():
        for chunk in by_rank.values():
            yield name, chunk


def _pieces(manifest: Manifest) -> Iterator[_Piece]:
    nothing = Box((), ())
    for file_name, file in manifest.files.items():
        yield _Piece("the header", Chunk(file_name, 0, file.header_bytes, nothing, file.header_checksums))
    blocks = max(1, _PIECE_BYTES // manifest.block_bytes)
    for name, chunk in sorted(all_chunks(manifest), key=lambda item: (item[1].file, item[1].offset)):
        for first in range(0, len(chunk.checksums) // 8, blocks):
            start = first * manifest.block_bytes
            num_bytes = min(blocks * manifest.block_bytes, chunk.num_bytes - start)
            checksums = chunk.checksums[first * 8 : (first + blocks) * 8]
            yield _Piece(name, replace(chunk, offset=chunk.offset + start, num_bytes=num_bytes, checksums=checksums))


def _wrong_blocks(storage: Storage, folder: Path, piece: _Piece, block_bytes: int, buffer: memoryview) -> list[str]:
    chunk = piece.chunk
    try:
        with storage.open_file(folder / chunk.file) as file:
            num_read = file.read_at(chunk.offset, buffer)
    except OSError as error:
        return [f"{chunk.file} cannot be read at offset {chunk.offset}: {error}."]
    checksums = block_checksums(buffer, block_bytes)
    wrong = [at // 8 for at in range(0, len(checksums), 8) if checksums[at : at + 8] != chunk.checksums[at : at + 8]]
    if num_read < chunk.num_bytes and not wrong:
        wrong = [num_read // block_bytes]
    return [
        f"{chunk.file} does not have the bytes of {piece.name!r} that were saved, "
        f"in the {block_bytes} bytes from offset {chunk.offset + block * block_bytes} on."
        for block in wrong
    ]
