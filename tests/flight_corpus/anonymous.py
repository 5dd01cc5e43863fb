"""Takes out of a recorder's files what names the machine that they were made on: its folders and its name."""

from __future__ import annotations

import socket
import struct
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any, Final

import msgpack

from disttrain.flight_recorder.dumps.dump import MAGIC
from disttrain.flight_recorder.record.ring import layout

_ROOT: Final = str(Path(__file__).parents[2])
_NAMES: Final = tuple(
    {
        sysconfig.get_path("purelib"): "/python/site-packages",
        sysconfig.get_path("platlib"): "/python/site-packages",
        str(Path(sysconfig.get_path("purelib")).parent): "/python/lib",
        sysconfig.get_path("stdlib"): "/python/lib",
        sys.prefix: "/python",
        _ROOT: "/job",
        socket.gethostname(): "node",
    }.items()
)


def rewrite(file: Path) -> None:
    """In place."""
    data = file.read_bytes()
    if data.startswith(MAGIC):
        file.write_bytes(_dump(data))
    elif data.startswith(layout.MAGIC):
        file.write_bytes(_ring(data))
    else:
        file.write_text(_text(data.decode(errors="replace")))


def _dump(data: bytes) -> bytes:
    unpacker = msgpack.Unpacker(strict_map_key=False, unicode_errors="surrogatepass")
    unpacker.feed(data[len(MAGIC) :])
    body = MAGIC
    for item in unpacker:
        if item[0] != "end":
            body += _packed(_without(item))
    return body + _packed(["end", zlib.crc32(body)])


def _ring(data: bytes) -> bytes:
    _, num_slots, num_counters, place = layout.LAYOUT.unpack_from(data, layout.LAYOUT_AT)
    head = data[:place]
    entries = b""
    while place + layout.ENTRY.size <= len(data):
        size, _ = layout.ENTRY.unpack_from(data, place)
        place += layout.ENTRY.size
        body = _packed(_without(msgpack.unpackb(data[place : place + size], strict_map_key=False)))
        entries += struct.pack("@II", len(body), zlib.crc32(body)) + body
        place += size
    assert len(head) == layout.entries_at(num_slots, num_counters)
    return head + entries


def _packed(item: Any) -> bytes:
    return bytes(msgpack.packb(item, unicode_errors="surrogatepass"))


def _without(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return [_without(one) for one in value]
    return {key: _without(one) for key, one in value.items()} if isinstance(value, dict) else value


def _text(text: str) -> str:
    # File names only: the machine's name may be a part of any word.
    if text == _NAMES[-1][0]:
        return _NAMES[-1][1]
    for name, anonymous in _NAMES[:-1]:
        text = text.replace(name, anonymous)
    return text
