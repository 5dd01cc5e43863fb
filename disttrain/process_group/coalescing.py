"""Several operations of one group as one: a single launch on NCCL, one wait at the end everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from disttrain.durations import Duration
from disttrain.errors import GroupError
from disttrain.process_group.current import resolve_group
from disttrain.process_group.group import ProcessGroup, barrier_device
from disttrain.process_group.work import Work


class Coalesced:
    """What `coalescing_manager` gives: `works`, one per operation, once the block has ended."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def wait(self, timeout: Duration | None = None) -> bool:
        """Wait for all of them. Raises as `Work.wait`; `timeout` is for each."""
        for work in self.works:
            work.wait(timeout)
        return True


@contextmanager
def coalescing_manager(
    group: ProcessGroup | None = None, device: torch.device | None = None, async_ops: bool = False
) -> Iterator[Coalesced]:
    """Let the operations of `group` that are called in the block go together; none of them waits there.

    Args:    device  where their tensors are (default: the rank's own device, where the group serves it).
             async_ops  False: the end of the block waits for all; True: the caller calls `wait` of what the block is
                        given.
    Raises:  GroupError for a block within a block of the same group.
    Collective: as the operations in it. One thread at a time.
    """
    group = resolve_group("coalescing_manager", group)
    if group.coalesced is not None:
        raise GroupError(
            "coalescing_manager",
            f"group {group.group_name} is coalescing already.",
            "End that block first.",
            rank=group.world.rank,
        )
    backend = group.backend("coalescing_manager", (device or barrier_device(group)).type)
    batch = Coalesced()
    group.coalesced = batch.works
    backend.start_coalescing()
    try:
        yield batch
    finally:
        group.coalesced = None
        together = backend.end_coalescing()
        if backend.coalesces:
            for work in batch.works:
                work.follow(together)
    if not async_ops:
        batch.wait()
