"""Values over a pipe: 4 bytes of length, then `disttrain.process_group.calls.packing`."""

from __future__ import annotations

import struct
from typing import IO, Any

from disttrain.process_group.calls.packing import pack, unpack

_HEADER = struct.Struct(">I")


def write_frame(stream: IO[bytes], value: Any) -> None:
    """Write one value; the reader gets an equal one."""
    data = pack(value)
    stream.write(_HEADER.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> Any:
    """The next value. Raises EOFError when the other side has gone."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise EOFError
    (size,) = _HEADER.unpack(header)
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return unpack(data)
