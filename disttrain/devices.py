"""Counts the GPUs and cores of this node, without torch or the CUDA runtime."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from disttrain import settings

DEVICE_DIRECTORY = Path("/dev")


def num_gpus(environ: Mapping[str, str], device_directory: Path = DEVICE_DIRECTORY) -> int:
    """GPUs that a process with this environment sees.

    CUDA_VISIBLE_DEVICES counts up to its first invalid entry, as the CUDA runtime does; names of GPUs or MIG slices
    count as they stand, since a slice is no device node of its own.
    """
    num_installed = _num_installed(environ, device_directory)
    visible = environ.get(settings.VISIBLE_GPUS.name)
    if visible is None or num_installed == 0:
        return num_installed
    num_visible = 0
    for entry in (text.strip() for text in visible.split(",")):
        is_number = re.fullmatch(r"-?\d+", entry) is not None
        if not entry or (is_number and not 0 <= int(entry) < num_installed):
            break
        num_visible += 1
    return num_visible


def _num_installed(environ: Mapping[str, str], device_directory: Path) -> int:
    num_nodes = sum(1 for path in device_directory.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    if num_nodes:
        return num_nodes
    # Under WSL there are GPUs without device nodes; the driver's own tool knows.
    tool = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if tool is None:
        return 0
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(1 for line in listed.stdout.splitlines() if re.match(r"GPU \d+:", line))


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
