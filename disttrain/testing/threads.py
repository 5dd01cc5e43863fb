"""Run a function on several ranks that are threads of this process: no start-up, no sockets, deadlocks reported."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from disttrain.process_group import Fabric, World, entered_world
from disttrain.store import HashStore

Result = TypeVar("Result")


def run_threads(
    world_size: int, function: Callable[..., Result], *arguments: Any, timeout_s: float = 60.0
) -> list[Result]:
    """Call `function(*arguments)` on `world_size` ranks, each a thread with a world of its own on the CPU.

    Returns: the results, by rank. Raises: the first rank's own error, with a note that names the rank; an error that
    merely reports that other ranks went away comes last.
    """
    fabric, store = Fabric(world_size), HashStore()
    results: dict[int, Result] = {}
    errors: list[tuple[int, BaseException]] = []

    def run_rank(rank: int) -> None:
        world = World(
            store,
            rank,
            world_size,
            backend="threads",
            timeout_s=timeout_s,
            device=torch.device("cpu"),
            options=fabric,
        )
        try:
            with entered_world(world):
                results[rank] = function(*arguments)
        except BaseException as error:  # noqa: BLE001 -- handed on to the caller below
            error.add_note(f"on rank {rank} of {world_size} threads")
            errors.append((rank, error))
        finally:
            fabric.leave(rank)

    threads = [threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # A rank that fails leaves the others in a deadlock, which they report: its own error came first.
        raise errors[0][1]
    return [results[rank] for rank in range(world_size)]
