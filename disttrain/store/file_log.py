"""A shared file as a log: records are appended under a lock and read by everybody, from where each left off.

A record is a CRC-32, then a frame as in `wire`. A writer that is killed in mid-record leaves an incomplete one at the
end: readers don't see it, and the next writer cuts it off.
"""

from __future__ import annotations

import fcntl
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from disttrain.errors import StoreError, StoreLimitError, StoreTimeoutError
from disttrain.store.protocol.wire import HEADER_BYTES, Decoder, Message, encode

_CRC_BYTES: Final = 4
_PREFIX_BYTES: Final = _CRC_BYTES + HEADER_BYTES
_FIRST_PAUSE_S: Final = 0.0002
_LONGEST_PAUSE_S: Final = 0.02


def pauses(deadline_s: float) -> Iterator[None]:
    """Yield at growing intervals until the deadline: a file gives no event to wait for."""
    pause_s = _FIRST_PAUSE_S
    while (remaining_s := deadline_s - time.monotonic()) > 0:
        time.sleep(min(pause_s, remaining_s))
        yield
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class FileLog:
    """One process's view of the log at `path`, which is made (mode 0600) where it does not exist."""

    def __init__(self, path: str, max_record_bytes: int) -> None:
        self.path = path
        self._max_record_bytes = max_record_bytes
        self._offset = 0
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            problem = f"the file cannot be opened: {error.strerror}."
            remedy = "Its folder must exist on every node, and the file must be our own."
            raise StoreError("FileStore", problem, remedy, where=path) from None

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def new_records(self) -> list[Message]:
        """Records that others, or we, have appended since the last call. A record that is not complete yet is not
        there."""
        size = os.fstat(self._descriptor).st_size
        if size - self._offset < _PREFIX_BYTES:
            return []
        data = os.pread(self._descriptor, size - self._offset, self._offset)
        records = []
        start = 0
        while (end := self._record_end(data, start)) <= len(data):
            frame = data[start + _CRC_BYTES : end]
            if zlib.crc32(frame).to_bytes(_CRC_BYTES, "big") != data[start : start + _CRC_BYTES]:
                problem = f"the record at byte {self._offset + start} is damaged."
                raise StoreError("FileStore", problem, "Each job needs a new file: remove this one.", where=self.path)
            records += Decoder(self._max_record_bytes).feed(frame)
            start = end
        self._offset += start
        return records

    @contextmanager
    def locked(self, deadline_s: float) -> Iterator[None]:
        """Nobody else appends. Raises StoreTimeoutError when another holds the lock for so long."""
        self._lock(deadline_s)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def append(self, record: Message) -> None:
        """Write one record; the lock must be held, and all records read that are there."""
        frame = encode(record)
        if len(frame) > self._max_record_bytes:
            problem = f"the request has {len(frame)} bytes; the limit is {self._max_record_bytes}."
            raise StoreLimitError("FileStore", problem, "Store less at once.", where=self.path)
        data = memoryview(zlib.crc32(frame).to_bytes(_CRC_BYTES, "big") + frame)
        # Whatever follows the last complete record was left by a writer that was killed.
        os.ftruncate(self._descriptor, self._offset)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self._offset + written)
        except OSError as error:
            os.ftruncate(self._descriptor, self._offset)
            problem = f"cannot write: {error.strerror}."
            raise StoreError("FileStore", problem, "See whether the disk is full.", where=self.path) from None

    def _lock(self, deadline_s: float) -> None:
        for _ in _now_and_after(pauses(deadline_s)):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            return
        problem = "another process has held the file's lock for the whole timeout."
        raise StoreTimeoutError("FileStore", problem, "See which one is stopped (`lsof`).", where=self.path)

    def _record_end(self, data: bytes, start: int) -> int:
        size = int.from_bytes(data[start + _CRC_BYTES : start + _PREFIX_BYTES], "big")
        return start + _PREFIX_BYTES + size


def _now_and_after(later: Iterator[None]) -> Iterator[None]:
    yield
    yield from later
