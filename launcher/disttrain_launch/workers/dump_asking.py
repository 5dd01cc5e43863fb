"""Workers that record are asked for their dumps, and waited for no longer than they take; rings they left are kept.

That another dump is there is told by Linux's inotify, through the C library. Only a node whose workers have recorded
loads this, and not before they end. Source: inotify(7).
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from disttrain.flight_recorder.dumps.dump import SUFFIX as DUMP_SUFFIX
from disttrain.flight_recorder.dumps.rings.orphaned_rings import collect, keep_silent
from disttrain.flight_recorder.dumps.rings.reader import ring_owner
from disttrain.flight_recorder.record.process.process_state import has_handler, start_of
from disttrain.flight_recorder.record.ring.layout import SUFFIX
from disttrain_launch.request.job import OPERATION

DUMP_S = 1.0
"""The time that workers may take to dump."""
_SILENT_S = 10.0
_MOVED_TO = 0x80
_EVENT = struct.Struct("iIII")
"""Watch, mask, cookie, and the length of the name that follows."""
_READ_BYTES = 1 << 16


class Dumping:
    """Has the processes of `sessions` that record dump into `folder`.

    `fd` becomes readable whenever a dump is there; None where the kernel does not tell. Others would die of the signal:
    who records is known by its ring, and by when it was started, since numbers of processes are used again; one whose
    recorder cannot dump, or not yet, does not handle it. Of those that are gone or stopped already the rings are kept
    in `folder` as they are.
    """

    def __init__(self, rings: Path, folder: Path, sessions: set[int]) -> None:
        _keep(keep_silent, rings, folder, _SILENT_S)
        # Before anybody is asked: then none is missed.
        self.fd = _watch(folder)
        self._awaited: set[str] = set()
        for ring in rings.glob(f"*{SUFFIX}"):
            owner = ring_owner(ring)
            try:
                if owner is None or os.getsid(owner.pid) not in sessions or start_of(owner.pid) != owner.start:
                    continue
                if has_handler(owner.pid, signal.SIGUSR2):
                    os.kill(owner.pid, signal.SIGUSR2)
                    self._awaited.add(ring.with_suffix(DUMP_SUFFIX).name)
            except (ProcessLookupError, PermissionError):
                continue  # It is the ring of a process that is gone.

    @property
    def is_over(self) -> bool:
        """True when all that were asked have dumped."""
        if self.fd is not None and self._awaited:
            self._awaited -= _names(self.fd)
        return not self._awaited

    def close(self) -> None:
        """Idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def collect_rings(rings: Path, folder: Path) -> None:
    """Adds the rings that workers of a round left to its dumps. For when they are gone."""
    _keep(collect, rings, folder)


def _keep(keep: Callable[..., None], rings: Path, folder: Path, *more: float) -> None:
    try:
        keep(rings, folder, *more)
    except OSError as problem:  # such as a full disk
        print(f"{OPERATION}: flight recorder: rings cannot be copied to {folder}: {problem}", file=sys.stderr)


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
