"""Run a function on several ranks that are threads of this process: no start-up, no sockets, deadlocks reported."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from disttrain.process_group import Fabric, World, entered_world
from disttrain.store import HashStore

Result = TypeVar("Result")


def run_threads(
    world_size: int, function: Callable[..., Result], *arguments: Any, timeout_s: float = 180.0
) -> list[Result]:
    """Call `function(*arguments)` on `world_size` ranks, each a thread with a world of its own on the CPU.

    Where torch computes with one thread each (`torch.set_num_threads(1)`, OMP_NUM_THREADS=1), the ranks share one core:
    Python runs one of them at a time anyway, and would wake another core's with each of torch's operators.

    Returns: the results, by rank. Raises: the first rank's own error, with a note that names the rank; an error that
    merely reports that other ranks went away comes last.
    """
    cores = _this_core() if torch.get_num_threads() == 1 else None
    fabric, store = Fabric(world_size), HashStore()
    results: dict[int, Result] = {}
    errors: list[tuple[int, BaseException]] = []

    def run_rank(rank: int) -> None:
        if cores is not None:
            with suppress(OSError):  # A container may forbid it.
                os.sched_setaffinity(0, cores)  # of this thread
        world = World(
            store,
            rank,
            world_size,
            backend="threads",
            timeout_s=timeout_s,
            device=torch.device("cpu"),
            options=fabric,
        )
        first_node = torch.zeros((), requires_grad=True).clone()
        try:
            with entered_world(world):
                results[rank] = function(*arguments)
        except BaseException as error:  # noqa: BLE001 -- handed on to the caller below
            error.add_note(f"on rank {rank} of {world_size} threads")
            errors.append((rank, error))
        finally:
            fabric.leave(rank)
            _drop_pending_gradients(first_node)

    threads = [threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # A rank that fails leaves the others in a deadlock, which they report: its own error came first.
        raise errors[0][1]
    return [results[rank] for rank in range(world_size)]


def _drop_pending_gradients(first_node: torch.Tensor) -> None:
    """Let go of what a backward that failed has left in this thread's queue of autograd.

    The queue goes when the thread has left Python, for which `join` doesn't wait: objects in it would then need an
    interpreter that may be ending, and abort the process. Autograd works off later nodes first, so a backward that
    comes to the thread's `first_node` has found all of them, and dropped those of backwards that are over.
    """
    first_node.backward()


def _this_core() -> set[int] | None:
    """The core on which the system has just put this thread, likely a free one. None where the system does not tell."""
    try:
        _, _, fields = Path("/proc/thread-self/stat").read_text().rpartition(")")
    except OSError:
        return None
    return {int(fields.split()[36])}  # "processor", see man 5 proc_pid_stat
