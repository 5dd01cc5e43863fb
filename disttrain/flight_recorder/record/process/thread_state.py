"""The activity of this process's threads, as the system sees it: computing, or waiting, and for what. Torch-free.

Python's stacks show a line. The kernel knows whether that line computes, sleeps or reads from an empty pipe (Linux:
/proc/self/task). If it does not say, nothing is recorded.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from pathlib import Path
from typing import Final

RUNNING: Final = "running"
_SAMPLE_S: Final = 0.05
_MIN_BUSY_S: Final = 0.002
"""Of processor time within a sample: less is a loop that sleeps."""

# Which call a thread sleeps in; those of the second kind act on a descriptor, which has a name.
_NAMES: Final = (
    *("poll", "select", "pselect6", "ppoll", "epoll_wait", "epoll_pwait", "wait4"),
    *("open", "openat", "stat", "statx", "newfstatat", "unlink", "rename", "mkdir"),
    *("nanosleep", "clock_nanosleep", "futex"),
)
_ON_DESCRIPTOR: Final = (
    *("read", "write", "pread64", "readv", "writev", "connect", "accept", "sendto", "recvfrom", "sendmsg", "recvmsg"),
    *("flock", "fsync", "accept4"),
)
_NUMBERS: Final = {
    "x86_64": (
        (7, 23, 270, 271, 232, 281, 61, 2, 257, 4, 332, 262, 87, 82, 83, 35, 230, 202),
        (0, 1, 17, 19, 20, 42, 43, 44, 45, 46, 47, 73, 74, 288),
    ),
    "aarch64": (
        (-1, -2, 72, 73, -3, 22, 260, -4, 56, -5, 291, 79, 35, 38, 34, 101, 115, 98),
        (63, 64, 67, 65, 66, 203, 202, 206, 207, 211, 212, 32, 82, 242),
    ),
}
IO_CALLS: Final = frozenset([*_ON_DESCRIPTOR, *_NAMES[:-3], "disk"])
"""The calls among `activities` that wait for somebody outside the process."""


def activities() -> dict[int, str]:
    """The activity of each Python thread but this one, by identity: `running`, or the call it sleeps in, such as `read
    of pipe:[7]`.

    Takes a twentieth of a second, for which the others may run.
    """
    threads = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    before_s = [_cpu_s(thread) for thread in threads]
    time.sleep(_SAMPLE_S)
    result = {}
    for thread, earlier_s in zip(threads, before_s, strict=True):
        is_busy = earlier_s is not None and (_cpu_s(thread) or 0.0) - earlier_s >= _MIN_BUSY_S
        if thread.ident is not None and (said := RUNNING if is_busy else _call(_native_id(thread))):
            result[thread.ident] = said
    return result


def _cpu_s(thread: threading.Thread) -> float | None:
    try:
        # A thread that has ended must not be asked for: its identity may lie in freed memory.
        return (
            time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) if thread.ident and thread.is_alive() else None
        )
    except (OSError, AttributeError):
        return None


def _native_id(thread: threading.Thread) -> int | None:
    # After a fork, the main thread's own still tells of its parent (Python 3.11).
    return os.getpid() if thread is threading.main_thread() else thread.native_id


def _call(native_id: int | None) -> str:
    task = Path(f"/proc/self/task/{native_id}")
    try:
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        words = (task / "syscall").read_text().split()
    except (OSError, IndexError):
        return ""
    if state == "D":
        return "disk"
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None or len(words) < 2 or not words[0].isdigit():
        return ""
    number = int(words[0])
    if number in numbers[0]:
        return _NAMES[numbers[0].index(number)]
    if number not in numbers[1]:
        return ""
    name = _ON_DESCRIPTOR[numbers[1].index(number)]
    try:
        return f"{name} of {os.readlink(f'/proc/self/fd/{int(words[1], 16)}')}"
    except OSError:
        return name
