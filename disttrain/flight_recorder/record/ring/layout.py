"""The layout of a ring file: a head of fixed size that is written in place, then entries that are appended.

    0     MAGIC, padded with zeros to 32 bytes
    32    version, number of slots, number of counters, where the entries begin: four u32
    48    u64 1: tells the byte order, which is the machine's own throughout
    56    u64 when the watchdog was last alive, in ns of the monotonic clock; 0 without one
    64    counters: u64 each, the last sequence number of a group or channel
          slots: SLOT each; the record `number` lies in slot `number % number of slots`
    ...   entries: length and crc32 (two u32), then a msgpack array that starts with what it is

docs/flight_dump_format.md lists the entries. Torch-free.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgpack

MAGIC: Final = b"disttrain flight ring\n".ljust(32, b"\0")
VERSION: Final = 4
SUFFIX: Final = ".ring"
STACKS_SUFFIX: Final = ".stacks"

LAYOUT: Final = struct.Struct("@IIII")
LAYOUT_AT: Final = len(MAGIC)
ORDER_AT: Final = 48
ALIVE_AT: Final = 56
COUNTERS_AT: Final = 64

SLOT: Final = struct.Struct("@QIIIIQQQQ")
"""Number, site, label, sequence, flags, began_ns, waits_ns, ended_ns (0: it has not), number again.

The last bit of the flags is 1 where it failed. `waits_ns` is when the host began to wait for it, 0 where it waited from
the first. The number is written first and last: where both differ, the process died between them.
"""
BEGUN_SLOT: Final = struct.Struct("@QIII4xQ16xQ")
"""The same to write for a call that has begun: without flags, `waits_ns` and `ended_ns`, which become zeros."""
_SLOT_OF_2: Final = struct.Struct("@QIIIIQQQ")
"""Before version 3: without `waits_ns`, which the flags told, but for their last bit: in us after `began_ns`."""
SLOT_WORDS: Final = SLOT.size // 8
SEQUENCE_WORD: Final = 2
BEGAN_WORD: Final = 3
WAITS_WORD: Final = 4
ENDED_WORD: Final = 5
FAILED_BIT: Final = 1 << 32 if sys.byteorder == "little" else 1
"""In the word that holds the sequence number, too."""

ENTRY: Final = struct.Struct("@II")
"""Length of an entry, and its crc32."""


def framed(entry: Iterable[Any]) -> bytes:
    """An entry as it lies in a ring."""
    body = bytes(msgpack.packb(list(entry), unicode_errors="surrogatepass"))
    return ENTRY.pack(len(body), zlib.crc32(body)) + body


def slots_at(num_counters: int) -> int:
    """The offset of the slots."""
    return COUNTERS_AT + 8 * num_counters


def entries_at(num_slots: int, num_counters: int, version: int = VERSION) -> int:
    """The offset of the entries."""
    return slots_at(num_counters) + (SLOT if version > 2 else _SLOT_OF_2).size * num_slots


def columns_of(slots: memoryview, version: int = VERSION) -> list[Sequence[int]]:
    """The fields of all slots of a ring, a column each, as in SLOT, whatever its version."""
    if version <= 2:
        return _columns_of_2(slots)
    words, halves = array("Q", bytes(slots)), array("I", bytes(slots))
    whole = [words[word::SLOT_WORDS] for word in (0, 3, 4, 5, 6)]
    parts = [halves[half :: 2 * SLOT_WORDS] for half in range(2, 6)]
    return [whole[0], *parts, *whole[1:]]


def _columns_of_2(slots: memoryview) -> list[Sequence[int]]:
    columns = [*zip(*_SLOT_OF_2.iter_unpack(slots), strict=True)] or [()] * 8
    numbers, sites, labels, sequences, flags, began_ns, ended_ns, again = columns
    waits_ns = [began + (flag >> 1) * 1000 if flag > 1 else 0 for flag, began in zip(flags, began_ns, strict=True)]
    return [numbers, sites, labels, sequences, [flag & 1 for flag in flags], began_ns, waits_ns, ended_ns, again]
