"""Writing one file fast: direct I/O by a few threads, from the caller's memory where that is aligned like the file.

The page cache costs a copy of all bytes, and makes them wait for the disk at the end; direct writes keep the disk busy
from the first piece on. What is not aligned (headers, small tensors, ends) goes through buffers. Source: open(2), on
O_DIRECT. A file system that has none is written to through its cache.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

ALIGNMENT = 4096
_PIECE_BYTES = 8 << 20
_NUM_THREADS = 4


def write_file(path: Path, parts: Iterable[memoryview]) -> None:
    """Write a new file of these parts; its content is durable on return. A part's memory must stay as it is."""
    with _Writer(path) as writer:
        for part in parts:
            writer.append(part)
        writer.finish()


class _Writer:
    """A file that grows by parts; pieces of it are under way, `_NUM_THREADS` at a time."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CLOEXEC
        self._cached = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        self._direct: int | None = None
        try:
            self._direct = os.open(path, flags | os.O_DIRECT)
        except (OSError, AttributeError):  # no direct I/O here
            pass
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "disttrain-write")
        self._running: dict[Future[None], _Buffer | None] = {}
        self._free: list[_Buffer] = []
        self._buffer: _Buffer | None = None
        self._num_bytes = 0
        self._is_given_up = threading.Event()

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
        data = part.cast("B")
        at = 0
        while at < len(data):
            if self._buffer is None and (size := self._aligned_bytes(data[at:])):
                self._start(self._num_bytes, data[at : at + size], None)
                self._num_bytes += size
            else:
                size = self._buffer_some(data[at:])
            at += size

    def finish(self) -> None:
        """Return once all is on the disk."""
        if self._buffer is not None:
            self._send(self._buffer)
        while self._running:
            self._collect()
        os.fsync(self._cached)

    def _aligned_bytes(self, data: memoryview) -> int:
        """How much of `data` can be written from where it lies."""
        if self._direct is None:
            return min(len(data), _PIECE_BYTES)
        if self._num_bytes % ALIGNMENT or np.frombuffer(data, np.uint8).ctypes.data % ALIGNMENT:
            return 0
        return min(len(data), _PIECE_BYTES) // ALIGNMENT * ALIGNMENT

    def _buffer_some(self, data: memoryview) -> int:
        """Copy from `data` what its buffer has room for, or what makes the rest aligned."""
        buffer = self._buffer = self._buffer or self._new_buffer()
        room = _PIECE_BYTES - buffer.num_bytes
        to_page = -self._num_bytes % ALIGNMENT
        lies_alike = (np.frombuffer(data, np.uint8).ctypes.data + to_page) % ALIGNMENT == 0
        if lies_alike and len(data) >= to_page + _PIECE_BYTES:
            room = min(room, to_page)
        size = min(room, len(data))
        buffer.view[buffer.num_bytes : buffer.num_bytes + size] = data[:size]
        buffer.num_bytes += size
        self._num_bytes += size
        if buffer.num_bytes == _PIECE_BYTES or (size == to_page and lies_alike and len(data) > size):
            self._send(buffer)
        return size

    def _new_buffer(self) -> _Buffer:
        while not self._free and len(self._running) > _NUM_THREADS:
            self._collect()
        buffer = self._free.pop() if self._free else _Buffer()
        buffer.offset, buffer.num_bytes = self._num_bytes, 0
        return buffer

    def _send(self, buffer: _Buffer) -> None:
        self._buffer = None
        if buffer.num_bytes:
            self._start(buffer.offset, buffer.view[: buffer.num_bytes], buffer)
        else:
            self._free.append(buffer)

    def _start(self, offset: int, data: memoryview, buffer: _Buffer | None) -> None:
        while len(self._running) > _NUM_THREADS:
            self._collect()
        self._running[self._pool.submit(self._write, offset, data)] = buffer

    def _collect(self) -> None:
        """Wait for one piece. Raises its error."""
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        for future in done:
            buffer = self._running.pop(future)
            future.result()
            if buffer is not None:
                self._free.append(buffer)

    def _write(self, offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data) and not self._is_given_up.is_set():  # a write may be short
            left, place = data[done:], offset + done
            aligned = len(left) // ALIGNMENT * ALIGNMENT if place % ALIGNMENT == done % ALIGNMENT == 0 else 0
            if self._direct is not None and aligned:
                done += os.pwrite(self._direct, left[:aligned], place)
            else:
                done += os.pwrite(self._cached, left, place)


class _Buffer:
    """Memory that begins with a page, for a piece of the file from `offset` on."""

    def __init__(self) -> None:
        self.view = memoryview(mmap.mmap(-1, _PIECE_BYTES))
        self.offset = 0
        self.num_bytes = 0
