"""A transport without peers: every collective ends at once, as if the other ranks held what this one holds.

For measuring the host's cost of a call, and for building models at the size of a job that isn't there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disttrain.process_group._c10d import Reduction
from disttrain.process_group.backends.base import Backend, CompletedWork, Membership
from disttrain.process_group.work import TransportWork

_COMPLETED = CompletedWork()


class FakeBackend(Backend):
    """Shapes and dtypes are right, reductions leave this rank's own values."""

    devices = ("cpu", "cuda", "meta")

    def __init__(self, membership: Membership) -> None:
        self._rank = membership.rank
        self._size = membership.size

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> TransportWork:
        return _COMPLETED

    def broadcast(self, tensor: torch.Tensor, src_rank: int, async_op: bool) -> TransportWork:
        return _COMPLETED

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> TransportWork:
        output.view(self._size, -1).copy_(input.view(-1))
        return _COMPLETED

    def reduce_scatter_tensor(
        self, output: torch.Tensor, input: torch.Tensor, op: Reduction, async_op: bool
    ) -> TransportWork:
        output.view(-1).copy_(input.view(self._size, -1)[self._rank])
        return _COMPLETED

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        async_op: bool,
    ) -> TransportWork:
        if output.shape == input.shape:
            output.copy_(input)
        return _COMPLETED

    def barrier(self, device: torch.device) -> TransportWork:
        return _COMPLETED

    def send(self, tensor: torch.Tensor, dst_rank: int, tag: int) -> TransportWork:
        return _COMPLETED

    def recv(self, tensor: torch.Tensor, src_rank: int, tag: int) -> TransportWork:
        return _COMPLETED

    def shutdown(self) -> None:
        """Nothing to let go of."""
