"""Several operations of one group as one: a single launch on NCCL, one wait at the end everywhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch

from disttrain.arguments import arguments_of
from disttrain.errors import GroupError
from disttrain.process_group._torch import profiler
from disttrain.process_group.backends import Backend
from disttrain.process_group.current import resolve_group
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.watching.ranges import COLLECTIVE, in_range, range_name
from disttrain.process_group.work import Work
from disttrain.store.durations import Duration


class Coalesced:
    """The result of `coalescing_manager`: `works`, one per operation, once the block has ended."""

    # Not a generator, which would take longer than the block.

    def __init__(self, group: ProcessGroup, backend: Backend, *, async_ops: bool) -> None:
        self.works: list[Work] = []
        self._group = group
        self._backend = backend
        self._async_ops = async_ops

    def wait(self, timeout: Duration | None = None) -> bool:
        """Wait for all of them. Raises as `Work.wait`; `timeout` is for each."""
        for work in self.works:
            work.wait(timeout)
        return True

    def __enter__(self) -> Self:
        group = self._group
        if group.coalesced is not None:
            raise GroupError(
                "coalescing_manager",
                f"group {group.group_name} is coalescing already.",
                "End that block first.",
                rank=group.world.rank,
            )
        self.works = group.coalesced = []
        self._backend.start_coalescing()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._group.coalesced = None
        end = self._backend.end_coalescing
        if profiler._is_profiler_enabled and self.works:
            # Here they are launched, where the backend has them go together.
            end = in_range(range_name(COLLECTIVE, "coalesced", self._group), end)
        together = end()
        if self._backend.coalesces:
            for work in self.works:
                work.follow(together)
        if error is None and not self._async_ops:
            self.wait()


def coalescing_manager(
    group: ProcessGroup | None = None, device: torch.device | None = None, async_ops: bool = False
) -> Coalesced:
    """Let the operations of `group` that are called in a `with` block go together; none of them waits there.

    Args:    device  where their tensors are (default: the rank's own device, where the group serves it).
             async_ops  False: the end of the block waits for all; True: the caller calls `wait` of what the block is
                        given.
    Raises:  GroupError for a block within a block of the same group.
    Collective: as the operations in it. One thread at a time.
    """
    group = resolve_group("coalescing_manager", group)
    if device is None:
        device = group.barrier_device
    else:
        with arguments_of("coalescing_manager", group.world.rank, "Give a torch.device."):
            device = torch.device(device)
    backend = group.backend("coalescing_manager", device.type)
    return Coalesced(group, backend, async_ops=async_ops)


_coalescing_manager = coalescing_manager
"""Its name in torch."""
