"""Reports from a training script to whoever watches it: `disttrain.report(step=step, loss=loss, tokens_per_s=rate)`.

The launcher creates a page for each rank, a mapped file. A report overwrites the last one; the launcher reads the page
about once a second. So a report is a copy within memory, however often it is made: no system call, no lock, no wait.
The page's last byte goes the other way: by it the launcher says what its signals to the worker mean. Torch-free.
"""

from __future__ import annotations

import functools
import mmap
import numbers
import os
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgpack

from disttrain import settings

REQUEUE_EXIT_CODE: Final = 75
"""A script's exit code, and then its launcher's, for: it has saved, and is to be started again. sysexits.h calls it
EX_TEMPFAIL."""

PAGE_BYTES: Final = 4096
_MARK_AT: Final = PAGE_BYTES - 1
_ASKS_AT: Final = PAGE_BYTES - 2
"""Where a worker says that it asks whether to stop."""
NOTICED: Final = b"n"
"""A mark of the launcher's: it was told to go, and has told the workers, or those that can hear it already."""
ENDING: Final = b"e"
"""Another one: the workers are stopped for another reason, such as a rank that failed; SIGTERM is no notice then."""
_HEAD: Final = struct.Struct("<II")
"""Bytes of the text, and their CRC-32: who reads while another writes sees that they don't fit."""

_listeners: Final[list[Listener]] = []
"""Of this process, as its page is: a report belongs to no world."""

Numbers = Mapping[str, int | float | None]
"""None: something that is no number."""


def report(
    step: int | None = None, loss: float | None = None, tokens_per_s: float | None = None, **others: float
) -> None:
    """Show how far this rank is, in the launcher's table, in `disttrain-launch status` and in trackers
    (`disttrain.trackers`); elsewhere do nothing.

    Of several ranks the table shows the lowest step, and the highest where it differs; the sum of what is named
    `..._per_s`, so that each rank says its own part, or one rank all of it; of everything else the mean.

    It never raises, and never waits. A tensor is no number, since a GPU would have to be waited for: it is shown as
    `?`. Give `loss.item()` where its value is known anyway. What has more than 4 KiB in all is not shown.

    Args: step  behind the rank, counted from 0 or 1;  loss  in its own unit;  tokens_per_s  since the last report;
          others  under their names. None: not told.
    """
    page = _own_page()
    if page is None and not _listeners:
        return
    values = {"step": step, "loss": loss, "tokens_per_s": tokens_per_s, **others}
    numbers = {name: _plain(value) for name, value in values.items() if value is not None}
    if page is not None:
        write(page, numbers)
    if _listeners:
        told = {name: value for name, value in numbers.items() if value is not None}
        at = told.pop("step", None)
        for listener in _listeners:
            listener.heard(None if at is None else int(at), told)


class Listener(Protocol):
    """Is given each report of this process, on whichever thread makes it; must neither wait nor raise."""

    def heard(self, step: int | None, numbers: dict[str, float]) -> None:
        """A report: its step, if it has one, and its other numbers."""
        ...


def add_listener(listener: Listener) -> None:
    """From now on `listener` hears of reports."""
    _listeners.append(listener)


def remove_listener(listener: Listener) -> None:
    """Hear no more; harmless where it does not."""
    _listeners[:] = [other for other in _listeners if other is not listener]


def combined(name: str, values: Sequence[float]) -> float:
    """Combines the numbers of several ranks under one name: rates add up, of others there is a mean."""
    return sum(values) if name.endswith("_per_s") else sum(values) / len(values)


def write(page: mmap.mmap, numbers: Numbers) -> None:
    """Put `told` on the page, with the time; where it is too long, leave the page as it is."""
    try:
        text = msgpack.packb([time.time(), numbers])
    except ValueError:
        return  # A name that no text can hold.
    if _HEAD.size + len(text) <= _ASKS_AT:
        page[: _HEAD.size + len(text)] = _HEAD.pack(len(text), zlib.crc32(text)) + text


def read(page: bytes) -> tuple[float, dict[str, int | float | None]] | None:
    """The time of the last report, in seconds since 1970, and its numbers; None: there is none, or it is being
    written."""
    if len(page) < PAGE_BYTES:
        return None
    size_bytes, checksum = _HEAD.unpack_from(page)
    text = page[_HEAD.size : _HEAD.size + size_bytes]
    if not text or zlib.crc32(text) != checksum:
        return None
    try:
        time_s, numbers = msgpack.unpackb(text)
        return float(time_s), {str(name): _plain(value) for name, value in numbers.items()}
    except (ValueError, TypeError, AttributeError):
        return None  # Somebody else's bytes.


def make_page(file: Path) -> None:
    """Make a page with nothing on it, or wipe it. Only its owner can read it. Raises OSError."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Where the disk is full this fails; a process that writes to a page that cannot be had would die of it.
        os.posix_fallocate(fd, 0, PAGE_BYTES)
        os.pwrite(fd, bytes(PAGE_BYTES), 0)
    finally:
        os.close(fd)


def put_mark(file: Path, mark: bytes) -> None:
    """Put a mark of the launcher's on a page. Raises OSError."""
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, mark, _MARK_AT)
    finally:
        os.close(fd)


def own_mark() -> bytes:
    """The launcher's mark on this process's page; empty where there is none, or no launcher."""
    page = _own_page()
    return b"" if page is None else page[_MARK_AT:].rstrip(b"\0")


def say_asks() -> None:
    """Let the launcher know that this worker takes SIGTERM for a notice, and so will the others."""
    page = _own_page()
    if page is not None:
        page[_ASKS_AT:_MARK_AT] = b"a"


def asks(page: bytes) -> bool:
    """True where the worker whose page this is has said so."""
    return page[_ASKS_AT:_MARK_AT] == b"a"


def open_page(file: Path) -> mmap.mmap:
    """Map a page. Raises OSError or ValueError where `file` is none."""
    fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, PAGE_BYTES)
    finally:
        os.close(fd)


@functools.cache
def _own_page() -> mmap.mmap | None:
    file = settings.REPORT_FILE.read()
    try:
        return None if file is None else open_page(file)
    except (OSError, ValueError):
        return None


def _plain(value: Any) -> int | float | None:
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return int(value)
    try:
        return float(value) if isinstance(value, numbers.Real) else None
    except (ValueError, OverflowError):
        return None
