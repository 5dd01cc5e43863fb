"""Packs a node's dumps for node 0, whose verdict needs those of all nodes, and unpacks them there.

What does not fit is left out, the largest files first: a store is no place for more.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Final

import msgpack

from disttrain.flight_recorder.dumps.dump import SUFFIX as DUMP_SUFFIX
from disttrain.flight_recorder.dumps.private_file import replace_file
from disttrain.flight_recorder.record.ring.layout import STACKS_SUFFIX
from disttrain.flight_recorder.record.ring.layout import SUFFIX as RING_SUFFIX

_SUFFIXES: Final = (DUMP_SUFFIX, RING_SUFFIX, STACKS_SUFFIX)
_MAX_NODE_BYTES: Final = 8 << 20
_MAX_JOB_BYTES: Final = 512 << 20
_MAX_FILE_BYTES: Final = 64 << 20
_NAME: Final = re.compile(r"rank-[\w.-]+")
_FASTEST: Final = 1


def pack(folder: Path, num_nodes: int) -> bytes:
    """The dumps in `folder`, compressed, within a node's share of what `num_nodes` may send. Raises OSError."""
    left_bytes = min(_MAX_NODE_BYTES, _MAX_JOB_BYTES // num_nodes)
    files = [file for file in folder.iterdir() if _is_dump(file.name) and file.is_file() and not file.is_symlink()]
    packed = {}
    for file in sorted(files, key=lambda file: file.stat().st_size):
        data = zlib.compress(file.read_bytes(), _FASTEST)
        left_bytes -= len(data)
        if left_bytes < 0:
            break
        packed[file.name] = data
    return bytes(msgpack.packb(packed))


def unpack(packed: bytes, folder: Path) -> None:
    """Write another node's dumps into `folder`, but for those that are there already. Raises OSError, ValueError."""
    files = msgpack.unpackb(packed)
    if not isinstance(files, dict):
        raise ValueError("no dumps")
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        if not (isinstance(name, str) and isinstance(data, bytes) and _is_dump(name)):
            raise ValueError(f"no dump: {name!r}")
        # Nodes may share the folder.
        if not (folder / name).exists():
            replace_file(folder / name, zlib.decompressobj().decompress(data, _MAX_FILE_BYTES))


def _is_dump(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and name.endswith(_SUFFIXES)
