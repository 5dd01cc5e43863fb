"""Workers that record are asked for their dumps, and waited for no longer than they take.

That another dump is there is told by Linux's inotify, through the C library. Only a job that fails loads this. Source:
inotify(7).
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from pathlib import Path

from disttrain.flight_recorder.dump import SUFFIX as DUMP_SUFFIX
from disttrain.flight_recorder.ring_layout import SUFFIX
from disttrain.flight_recorder.ring_reader import ring_owner

DUMP_S = 1.0
"""How long workers may take to dump."""
_MOVED_TO = 0x80
_EVENT = struct.Struct("iIII")
"""Watch, mask, cookie, and the length of the name that follows."""
_READ_BYTES = 1 << 16


class Dumping:
    """Has the processes of `sessions` that record into `folder` dump.

    `fd` becomes readable whenever a dump is there; None where the kernel does not tell. Who does not record would die
    of the signal, and is left alone: who does is known by its ring.
    """

    def __init__(self, folder: Path, sessions: set[int]) -> None:
        # Before anybody is asked: then none is missed.
        self.fd = _watch(folder)
        self._awaited: set[str] = set()
        for ring in folder.glob(f"*{SUFFIX}"):
            try:
                pid = ring_owner(ring)
                if pid is not None and os.getsid(pid) in sessions:
                    os.kill(pid, signal.SIGUSR2)
                    self._awaited.add(ring.with_suffix(DUMP_SUFFIX).name)
            except (ProcessLookupError, PermissionError):
                continue  # It is the ring of a process that is gone.

    @property
    def is_over(self) -> bool:
        """Whether all that were asked have dumped."""
        if self.fd is not None and self._awaited:
            self._awaited -= _names(self.fd)
        return not self._awaited

    def close(self) -> None:
        """Idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _watch(folder: Path) -> int | None:
    """A descriptor that tells of files that are moved into `folder`; None when the kernel has no more of them."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        return None
    if libc.inotify_add_watch(fd, os.fsencode(folder), _MOVED_TO) < 0:
        os.close(fd)
        return None
    return fd


def _names(fd: int) -> set[str]:
    """Of the files that came since the last call."""
    try:
        data = os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return set()
    names, at = set(), 0
    while at < len(data):
        *_, num_bytes = _EVENT.unpack_from(data, at)
        at += _EVENT.size
        names.add(os.fsdecode(data[at : at + num_bytes].rstrip(b"\0")))
        at += num_bytes
    return names
