"""Reads a local file: large requests past the page cache, where the caller's memory is aligned like the file.

Through the cache, a read costs a copy, and one thread leaves the disk idle half of the time. Source: open(2), on
O_DIRECT. torch aligns memory by 64 bytes and disks need 512 or more, so readers of tensors pass `aligned_memory`. It
uses large pages where there are any (madvise(2)): a disk's request has a limited number of pieces of memory, so
scattered small pages take several times as many requests.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from contextlib import suppress
from pathlib import Path

PAGE_BYTES = 4096
_LARGE_PAGE_BYTES = 2 << 20
DIRECT_BYTES = 1 << 19
"""Smaller requests go through the cache, where other ranks of the node may find them again."""


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class LocalFile:
    """An open file; any thread may read."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, also for what is no file: a pipe would have whoever opens it wait for its other end."""
        self._cached = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        self._direct: int | None = None
        self._refuses = False
        status = os.fstat(self._cached)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._cached)
            raise OSError(errno.EINVAL, f"It is {_KINDS.get(stat.S_IFMT(status.st_mode), 'no file')}", str(path))
        self.num_bytes = status.st_size
        if self.num_bytes >= DIRECT_BYTES:
            try:
                self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except (OSError, AttributeError):  # no direct I/O here
                pass

    def close(self) -> None:
        for descriptor in (self._cached, self._direct):
            if descriptor is not None:
                os.close(descriptor)

    def read_at(self, offset: int, buffer: memoryview) -> int:
        size = len(buffer)
        if self._direct is None or self._refuses or size < DIRECT_BYTES or (address_of(buffer) - offset) % PAGE_BYTES:
            return self._read(self._cached, offset, buffer)
        head = -offset % PAGE_BYTES
        tail = head + (size - head) // PAGE_BYTES * PAGE_BYTES
        try:
            done = self._read(self._direct, offset + head, buffer[head:tail])
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Some file systems open files so, and then refuse to read them.
            self._refuses = True
            return self._read(self._cached, offset, buffer)
        ends = self._read(self._cached, offset, buffer[:head]) if head else 0
        if tail < size and done == tail - head:
            ends += self._read(self._cached, offset + tail, buffer[tail:])
        return done + ends

    def _read(self, descriptor: int, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` as far as the file goes: beyond its end direct I/O would be refused."""
        done, size = 0, min(len(buffer), self.num_bytes - offset)
        while done < size:
            num_read = os.preadv(descriptor, [buffer[done:]], offset + done)
            if num_read == 0:
                break
            done += num_read
        return done


def aligned_memory(num_bytes: int) -> memoryview:
    """Memory that begins with a page, a large one where it is large itself."""
    is_large = num_bytes >= _LARGE_PAGE_BYTES
    # Not shared, which is the default: shared memory has no large pages on most machines.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(num_bytes, 1) + is_large * _LARGE_PAGE_BYTES, flags=flags)
    view = memoryview(memory)
    if is_large:
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        first = -address_of(view) % _LARGE_PAGE_BYTES
        view = view[first : first + num_bytes]
    return view


def address_of(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
