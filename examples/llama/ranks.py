"""What concerns all ranks: to join, to stop together."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import disttrain
from disttrain import settings
from disttrain.errors import DisttrainError

EXIT_CODE = 2


def join() -> torch.device:
    """Become a rank of the job, or all of it when the script was started by itself. Returns the rank's device."""
    disttrain.init_process_group()
    device = disttrain.current_world().device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif not settings.NUM_THREADS.is_set():
        # Ranks that share a node share its cores; more threads than cores would only wait for each other.
        torch.set_num_threads(max(1, _num_cores() // (settings.LOCAL_WORLD_SIZE.read() or 1)))
    return device


def _num_cores() -> int:
    """Those that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def together() -> Iterator[None]:
    """Around what every rank does but some may fail at: then all ranks end, and the first that failed says why.

    A rank that ended by itself would leave the others waiting for it in their next collective.
    """
    problem = None
    try:
        yield
    except (DisttrainError, OSError) as error:
        problem = error
    rank, num_ranks = disttrain.get_rank(), disttrain.get_world_size()
    first_failed = torch.tensor(num_ranks if problem is None else rank)
    disttrain.all_reduce(first_failed, disttrain.ReduceOp.MIN)
    if first_failed < num_ranks:
        if first_failed == rank:
            print(problem, file=sys.stderr, flush=True)
        # The launcher stops all ranks when the first one ends: not before the message is out.
        disttrain.barrier()
        sys.exit(EXIT_CODE)


def is_alike(*numbers: int) -> bool:
    """Whether all ranks have the same numbers. Every rank must call, with as many."""
    least = torch.tensor(numbers)
    most = least.clone()
    disttrain.all_reduce(least, disttrain.ReduceOp.MIN)
    disttrain.all_reduce(most, disttrain.ReduceOp.MAX)
    return torch.equal(least, most)


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this rank has had so far: of its GPU's memory, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
