"""Is a process still the one that it was, and does it run? What the system says (Linux: /proc). Torch-free."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

GONE: Final = "gone"
STOPPED: Final = "stopped"


def start_of(pid: int) -> int:
    """The start of process `pid`, in ticks since the machine's start: with it a number names one process for good.

    0 where the system does not tell, or there is no such process.
    """
    fields = _fields(pid)
    return int(fields[19]) if len(fields) > 19 and fields[19].isdigit() else 0


def has_handler(pid: int, signal_number: int) -> bool:
    """True if process `pid` handles this signal, which may end it otherwise, or if the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return True
    _, separator, mask = status.partition("\nSigCgt:")
    return not separator or bool(int(mask.split(maxsplit=1)[0], 16) >> (signal_number - 1) & 1)


def state_of(pid: int, start: int, ring: Path) -> str:
    """`gone`, `stopped`, or empty: it runs, or nobody knows.

    Args: start  as `start_of` had it;  ring  a file that the process has locked, which tells in containers, too.
    """
    try:
        descriptor = os.open(ring, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return GONE
    except OSError:
        pass  # The process has it, or a child that was forked off.
    finally:
        os.close(descriptor)
    return STOPPED if start and start_of(pid) == start and _fields(pid)[0] in "Tt" else ""


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; before them stands a name with anything in it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
