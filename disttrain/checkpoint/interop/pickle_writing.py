"""Writes pickles (protocol 2) of plain values, and of what `disttrain._python.pickles` reads as data."""

from __future__ import annotations

import struct
from typing import Any

from disttrain._python.pickles import Made, Map, Name, Persistent
from disttrain.errors import CheckpointError


def dumps(value: Any) -> bytes:
    """A pickle (protocol 2) that says `value`: plain values, and Names, Maps, Mades and Persistents among them.

    Raises CheckpointError for anything else.
    """
    parts: list[bytes] = [b"\x80\x02"]
    _write(value, parts, {})
    return b"".join([*parts, b"."])


def _write(value: Any, parts: list[bytes], names: dict[Name, int]) -> None:
    if value is None or isinstance(value, bool):
        parts.append({None: b"N", True: b"\x88", False: b"\x89"}[value])
    elif type(value) is int:
        parts.append(_integer(value))
    elif type(value) is float:
        parts.append(b"G" + struct.pack(">d", value))
    elif type(value) is str:
        text = value.encode("utf-8", "surrogatepass")
        parts.append(b"X" + struct.pack("<I", len(text)) + text)
    elif type(value) is bytes:  # as protocol 2 has it, without an opcode of its own
        _write(Made(Name("_codecs", "encode"), (value.decode("latin1"), "latin1")), parts, names)
    elif isinstance(value, Name):
        _write_name(value, parts, names)
    elif isinstance(value, dict | Map):
        parts.append(b"}")
        _write_pairs(value.items() if isinstance(value, dict) else value, parts, names)
    elif type(value) is list:
        parts.append(b"](")
        _write_all(value, parts, names)
        parts.append(b"e")
    elif type(value) is tuple:
        parts.append(b"(")
        _write_all(value, parts, names)
        parts.append(b"t")
    elif isinstance(value, Persistent):
        _write(value.key, parts, names)
        parts.append(b"Q")
    elif isinstance(value, Made):
        _write_made(value, parts, names)
    else:
        raise CheckpointError(
            "save", f"a {type(value).__name__} has no place in torch's formats.", "Save plain values and tensors."
        )


def _write_all(values: Any, parts: list[bytes], names: dict[Name, int]) -> None:
    for value in values:
        _write(value, parts, names)


def _write_pairs(pairs: Any, parts: list[bytes], names: dict[Name, int]) -> None:
    parts.append(b"(")
    for pair in pairs:
        _write_all(pair, parts, names)
    parts.append(b"u")


def _write_name(name: Name, parts: list[bytes], names: dict[Name, int]) -> None:
    if name in names:
        parts.append(b"j" + struct.pack("<I", names[name]))
        return
    names[name] = len(names)
    parts.append(f"c{name.module}\n{name.name}\n".encode() + b"r" + struct.pack("<I", names[name]))


def _write_made(made: Made, parts: list[bytes], names: dict[Name, int]) -> None:
    _write(made.what, parts, names)
    _write(made.args, parts, names)
    parts.append(b"\x81" if made.is_object else b"R")
    if made.state is not None:
        _write(made.state, parts, names)
        parts.append(b"b")


def _integer(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(raw) < 256:
        return b"\x8a" + bytes([len(raw)]) + raw
    return b"\x8b" + struct.pack("<i", len(raw)) + raw
