"""Writes one file fast: direct I/O by several threads, from the caller's memory where that is aligned like the file.

The page cache costs a copy of all bytes, and makes them wait for the disk at the end; direct writes keep the disk busy
from the first piece on. A write that extends a file locks out all other writes to it (ext4, XFS), so room is reserved
before. Pieces that are not aligned or not contiguous in memory are first copied by the thread that writes. A file's
last piece is written through the cache if it is small, and so are all pieces where the file system has no direct I/O.
Sources: open(2), on O_DIRECT; fallocate(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Self

from disttrain.checkpoint.storage.local_file import DIRECT_BYTES, PAGE_BYTES, aligned_memory

_PIECE_BYTES = 8 << 20
_NUM_THREADS = 8
_RESERVED_BYTES = 1 << 30
"""The room that is reserved at once; the rest of it is given back at the end."""

_FREE_SHARE = 64
"""At most this part of the free space is reserved at once, since other writers must not run out of space that is
returned later."""


def write_file(path: Path, parts: Iterable[memoryview]) -> None:
    """Write a new file of these parts; its content is durable on return. A part's memory must stay as it is."""
    with _Writer(path) as writer:
        for part in parts:
            writer.append(part)
        writer.finish()


class _Writer:
    """A file that grows by parts; it is written in pieces that begin at multiples of their size."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CLOEXEC
        self._cached = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        self._direct: int | None = None
        try:
            self._direct = os.open(path, flags | os.O_DIRECT)
        except (OSError, AttributeError):  # no direct I/O here
            pass
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "disttrain-write")
        self._running: set[Future[None]] = set()
        self._piece: list[memoryview] = []
        self._num_bytes = 0
        self._reserved_bytes = 0
        self._buffers = threading.local()
        self._is_given_up = threading.Event()
        self._refuses = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_given_up.set()
        self._pool.shutdown()
        for descriptor in (self._cached, self._direct):
            if descriptor is not None:
                os.close(descriptor)

    def append(self, part: memoryview) -> None:
        """Write `part` after those before."""
        data, at = part.cast("B"), 0
        while at < len(data):
            size = min(len(data) - at, _PIECE_BYTES - self._num_bytes % _PIECE_BYTES)
            self._piece.append(data[at : at + size])
            self._num_bytes += size
            at += size
            if self._num_bytes % _PIECE_BYTES == 0:
                self._start(self._num_bytes - _PIECE_BYTES)

    def finish(self) -> None:
        """Return once all is on the disk."""
        if self._piece:
            self._start(self._num_bytes // _PIECE_BYTES * _PIECE_BYTES)
        while self._running:
            self._collect()
        if self._reserved_bytes:
            os.ftruncate(self._cached, self._num_bytes)
        os.fsync(self._cached)

    def _start(self, offset: int) -> None:
        """Have the piece that begins there written."""
        # As many as are being written may be ready.
        while len(self._running) >= 2 * _NUM_THREADS:
            self._collect()
        is_full = self._num_bytes - offset == _PIECE_BYTES
        if self._direct is not None and is_full and self._num_bytes > self._reserved_bytes:
            room = min(_RESERVED_BYTES, _free_bytes(self._direct) // _FREE_SHARE)
            if room >= _PIECE_BYTES:
                self._reserved_bytes = offset + room
                _reserve(self._direct, self._reserved_bytes)
        piece, self._piece = self._piece, []
        self._running.add(self._pool.submit(self._write, offset, piece))

    def _collect(self) -> None:
        """Wait for one piece. Raises its error."""
        done, self._running = wait(self._running, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()

    def _write(self, offset: int, piece: Sequence[memoryview]) -> None:
        is_small = sum(map(len, piece)) < DIRECT_BYTES
        direct = None if is_small else self._direct
        if len(piece) == 1 and (direct is None or not _is_apart(piece[0])):
            data = piece[0]
        else:
            data = memoryview(b"".join(piece)) if is_small else self._together(piece)
        done = 0
        while done < len(data) and not self._is_given_up.is_set():  # a write may be short
            rest, position = data[done:], offset + done
            aligned = len(rest) // PAGE_BYTES * PAGE_BYTES if done % PAGE_BYTES == 0 else 0
            if direct is not None and aligned and not self._refuses:
                done += self._write_past_cache(direct, rest[:aligned], position)
            else:
                done += os.pwrite(self._cached, rest, position)

    def _write_past_cache(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Returns: how much was written; nothing where that is refused."""
        try:
            return os.pwrite(descriptor, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Some file systems open files so, and then refuse to write them.
            self._refuses = True
            return 0

    def _together(self, piece: Sequence[memoryview]) -> memoryview:
        """The piece in memory of this thread's own, which begins with a page."""
        import numpy as np  # here, since a process that writes what is small starts in half the time without it

        if not hasattr(self._buffers, "memory"):
            self._buffers.memory = np.frombuffer(aligned_memory(_PIECE_BYTES), np.uint8)
        memory, at = self._buffers.memory, 0
        for part in piece:
            # numpy lets other threads run meanwhile.
            np.copyto(memory[at : at + len(part)], np.frombuffer(part, np.uint8))
            at += len(part)
        return memoryview(memory)[:at]


def _is_apart(data: memoryview) -> bool:
    """True if it begins within a page."""
    import numpy as np  # here, as above

    return bool(np.frombuffer(data, np.uint8).ctypes.data % PAGE_BYTES)


def _free_bytes(descriptor: int) -> int:
    try:
        file_system = os.fstatvfs(descriptor)
    except OSError:  # nobody can know
        return 0
    return file_system.f_bavail * file_system.f_frsize


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Reserves space. If that fails, the writes themselves raise, or succeed without it."""
    # Not `os.posix_fallocate`: where the file system cannot, that writes to each block instead.
    fallocate = ctypes.CDLL(None).fallocate
    fallocate(descriptor, 0, ctypes.c_longlong(0), ctypes.c_longlong(num_bytes))
