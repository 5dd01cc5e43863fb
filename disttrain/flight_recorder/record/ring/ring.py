"""The ring: this process's last records in a mapped file, which outlives it however it ends; or in memory alone.

Records are numbers in slots of fixed size, written in place. An entry describes each group, call site, stack and label
once, when it first appears. Torch-free.

Memory is bounded: slots and counters take 145 KiB with 2000 records. Entries take MAX_ENTRIES_BYTES at most, or twice
what the slots refer to, before those that no slot refers to are dropped.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from disttrain.flight_recorder.record.ring import layout

MAX_ENTRIES_BYTES: Final = 4 << 20
NUM_COUNTERS: Final = 4096


class Ring:
    """`memory` holds the slots, `words` is the same as 64-bit numbers; `file` is None where there is none."""

    def __init__(self, num_slots: int, file: Path | None = None, link: Path | None = None) -> None:
        """Raises OSError when `file` cannot be made; only its owner can read it. `link` then leads to it."""
        self.num_slots = num_slots
        self.file = file
        self._link = link
        self.slots_at = layout.slots_at(NUM_COUNTERS)
        self.first_word = self.slots_at // 8
        self._entries_at = layout.entries_at(num_slots, NUM_COUNTERS)
        self._entries = bytearray()
        self._num_kept_bytes = 0
        self._free_counters = deque(range(layout.COUNTERS_AT // 8 + 1, layout.COUNTERS_AT // 8 + NUM_COUNTERS))
        self._fd = -1
        self._pid = os.getpid()
        if file is not None:
            self._fd = _locked(file)
        try:
            if self._fd >= 0:
                os.ftruncate(self._fd, 0)
                # This fails if the disk is full; writing to a mapped page without disk space would kill the process.
                os.posix_fallocate(self._fd, 0, self._entries_at)
            # Whole pages are mapped; what lies beyond the slots in the last one is written through the descriptor only.
            self.memory = mmap.mmap(self._fd, self._entries_at)
        except OSError:
            self.close()
            raise
        if link is not None and file is not None:
            with suppress(OSError):  # Some file systems have no links: then the launcher still finds the ring.
                link.symlink_to(file)
        self.words = memoryview(self.memory).cast("Q")
        self.memory[: len(layout.MAGIC)] = layout.MAGIC
        numbers = (layout.VERSION, num_slots, NUM_COUNTERS, self._entries_at)
        layout.LAYOUT.pack_into(self.memory, layout.LAYOUT_AT, *numbers)
        self.words[layout.ORDER_AT // 8] = 1

    def describe(self, *entry: Any) -> None:
        """Append an entry. Where the disk is full, the file goes without it."""
        self._append(layout.framed(entry))

    def counter(self) -> int:
        """The word of a new counter; the last one is shared by all that there are too many of."""
        return self._free_counters.popleft() if self.has_counters else self._free_counters[0]

    def release(self, word: int) -> None:
        """Nobody needs this counter any more."""
        if word != self._free_counters[-1]:
            self.words[word] = 0
            self._free_counters.appendleft(word)

    @property
    def is_full(self) -> bool:
        """True when it is time to `replace` the entries."""
        # If the records need more than that, replacing entries at each new one would cost more than it gains.
        return len(self._entries) > max(MAX_ENTRIES_BYTES, 2 * self._num_kept_bytes)

    @property
    def has_counters(self) -> bool:
        """False when the next one is to be shared."""
        return len(self._free_counters) > 1

    def replace(self, entries: Iterable[Iterable[Any]]) -> None:
        """Let these entries stand in place of all others."""
        data = b"".join(map(layout.framed, entries))
        self._entries = bytearray(data)
        self._num_kept_bytes = len(data)
        if self._fd >= 0:
            try:
                # A process that dies in between leaves old entries behind the new ones, which a reader notices.
                os.pwrite(self._fd, data, self._entries_at)
                os.ftruncate(self._fd, self._entries_at + len(data))
            except OSError:
                pass  # A full disk must not end the job.

    def beat(self) -> None:
        """Note that the process is alive."""
        self.words[layout.ALIVE_AT // 8] = time.monotonic_ns()

    def slots(self) -> Iterator[tuple[int, ...]]:
        """The contents of each slot, as in `layout.SLOT`."""
        return layout.SLOT.iter_unpack(memoryview(self.memory)[self.slots_at : self._entries_at])

    def activity(self) -> int:
        """The time of the last begin or end of a call, in ns of the monotonic clock; 0 when there was none."""
        # In C: meanwhile the training waits for the interpreter.
        columns = (self.first_word + word for word in (layout.BEGAN_WORD, layout.ENDED_WORD))
        return max(max(self.words[column :: layout.SLOT_WORDS]) for column in columns)

    def content(self) -> bytes:
        """The bytes of the file, also where there is none."""
        return bytes(self.memory) + bytes(self._entries)

    def close(self) -> None:
        """Remove file and link; records may still be written, to memory. A forked child has no part in it."""
        if self.file is not None and self._fd >= 0 and os.getpid() == self._pid:
            for path in filter(None, (self._link, self.file)):
                path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def _append(self, data: bytes) -> None:
        offset = self._entries_at + len(self._entries)
        self._entries += data
        if self._fd >= 0:
            try:
                os.pwrite(self._fd, data, offset)
            except OSError:
                pass  # A full disk must not end the job.


def _locked(file: Path) -> int:
    """A descriptor of `file`, locked until this process is gone: who gets the lock later knows that it is nobody's."""
    # What it is emptied for is its own: a link, which others may have put there, is not followed.
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
