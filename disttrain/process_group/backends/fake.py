"""A transport without peers: every collective ends at once, as if the other ranks held what this one holds.

For measuring the host's cost of a call, and for building models at the size of a job that isn't there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disttrain.process_group._c10d import Reduction, copy_to_all
from disttrain.process_group.backends.base import AnySourceWork, Backend, CompletedWork, Membership
from disttrain.process_group.work import TransportWork

_COMPLETED = CompletedWork()


class _FromFirstRank(CompletedWork):
    def source_rank(self) -> int:
        return 0


class FakeBackend(Backend):
    """Shapes and dtypes are right, reductions leave this rank's own values."""

    devices = ("cpu", "cuda", "meta")
    has_peers = False
    reports_absent = False

    def __init__(self, membership: Membership) -> None:
        self._rank = membership.rank
        self._size = membership.size

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> TransportWork:
        return _COMPLETED

    def reduce(self, tensor: torch.Tensor, dst_rank: int, op: Reduction, async_op: bool) -> TransportWork:
        return _COMPLETED

    def broadcast(self, tensor: torch.Tensor, src_rank: int, async_op: bool) -> TransportWork:
        return _COMPLETED

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> TransportWork:
        output.view(self._size, *input.shape).copy_(input)
        return _COMPLETED

    def all_gather(self, outputs: Sequence[torch.Tensor], input: torch.Tensor, async_op: bool) -> TransportWork:
        try:
            copy_to_all(outputs, input)
        except RuntimeError:
            shape = input.shape
            copy_to_all([output for output in outputs if output.shape == shape], input)
        return _COMPLETED

    def gather(
        self, input: torch.Tensor, outputs: Sequence[torch.Tensor], dst_rank: int, async_op: bool
    ) -> TransportWork:
        copy_to_all(outputs, input)
        return _COMPLETED

    def scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], src_rank: int, async_op: bool
    ) -> TransportWork:
        if inputs:
            output.copy_(inputs[self._rank])
        return _COMPLETED

    def reduce_scatter_tensor(
        self, output: torch.Tensor, input: torch.Tensor, op: Reduction, async_op: bool
    ) -> TransportWork:
        # As one view: half of what this takes goes for making views.
        offset = input.storage_offset() + self._rank * output.numel()
        output.copy_(input.as_strided(output.shape, output.stride(), offset))
        return _COMPLETED

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Reduction, async_op: bool
    ) -> TransportWork:
        output.copy_(inputs[self._rank])
        return _COMPLETED

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> TransportWork:
        for output, input_ in zip(outputs, inputs, strict=True):
            if output.shape == input_.shape:
                output.copy_(input_)
        return _COMPLETED

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        async_op: bool,
    ) -> TransportWork:
        if output_splits is input_splits or output_splits == input_splits or output.shape == input.shape:
            output.copy_(input)
        return _COMPLETED

    def barrier(self, device: torch.device) -> TransportWork:
        return _COMPLETED

    def send(self, tensor: torch.Tensor, dst_rank: int, tag: int) -> TransportWork:
        return _COMPLETED

    def recv(self, tensor: torch.Tensor, src_rank: int, tag: int) -> TransportWork:
        return _COMPLETED

    def recv_any(self, tensor: torch.Tensor, tag: int) -> AnySourceWork:
        return _FromFirstRank()

    def shutdown(self, wait_s: float) -> None:
        """Nothing to let go of."""
