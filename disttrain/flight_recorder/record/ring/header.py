"""The first entries of a ring: its rank and process, and the clock of its times."""

from __future__ import annotations

import os
import platform
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from disttrain.flight_recorder.dumps.words import DUMP_VERSION
from disttrain.flight_recorder.record.process.process_state import start_of
from disttrain.flight_recorder.record.process.symbols import LIBRARIES, PACKAGE
from disttrain.version import __version__

if TYPE_CHECKING:
    from disttrain.process_group import World


def ring_header(world: World, job: str) -> dict[str, Any]:
    """The header of this process, a rank of `world`; docs/flight_dump_format.md lists the fields."""
    return {
        "version": DUMP_VERSION,
        "rank": world.rank,
        "world_size": world.world_size,
        "job": job,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start": start_of(os.getpid()),
        "started_s": time.time(),
        "versions": {
            "disttrain": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "package": PACKAGE,
        "libraries": LIBRARIES,
        "epoch_ns": time.time_ns() - time.monotonic_ns(),
        "main_thread": threading.main_thread().ident,
    }
