"""What Gloo and NCCL have in common: the calls of torch's `c10d::Backend`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch

from disttrain.process_group import _c10d
from disttrain.process_group._c10d import Reduction, Transport
from disttrain.process_group.backends.base import Backend, CompletedWork, Membership
from disttrain.process_group.work import TransportWork


class C10dBackend(Backend):
    """Calls a C++ transport. Abstract: subclasses make `_transport`."""

    _transport: Transport
    _is_adopted = False

    def __init__(self, membership: Membership) -> None:
        self._store = _c10d.StoreAdapter(membership.store)
        self._global_rank = membership.global_rank

    @classmethod
    def adopting(cls, transport: Transport, membership: Membership) -> Self:
        """A backend on a transport that somebody else made, and shuts down."""
        made = cls.__new__(cls)
        C10dBackend.__init__(made, membership)
        made._transport = transport
        made._is_adopted = True
        return made

    @property
    def transport(self) -> Transport:
        """The C++ half."""
        return self._transport

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> TransportWork:
        options = _c10d.AllreduceOptions()
        options.reduceOp = op  # type: ignore[assignment]  # the stubs know one of the two kinds
        options.asyncOp = async_op
        return _work(self._transport.allreduce([tensor], options))

    def broadcast(self, tensor: torch.Tensor, src_rank: int, async_op: bool) -> TransportWork:
        options = _c10d.BroadcastOptions()
        options.rootRank = src_rank
        options.rootTensor = 0
        options.asyncOp = async_op
        return _work(self._transport.broadcast([tensor], options))

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> TransportWork:
        options = _c10d.AllgatherOptions()
        options.asyncOp = async_op
        return _work(self._transport._allgather_base(output, input, options))

    def reduce_scatter_tensor(
        self, output: torch.Tensor, input: torch.Tensor, op: Reduction, async_op: bool
    ) -> TransportWork:
        options = _c10d.ReduceScatterOptions()
        options.reduceOp = op  # type: ignore[assignment]  # the stubs know one of the two kinds
        options.asyncOp = async_op
        return _work(self._transport._reduce_scatter_base(output, input, options))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        async_op: bool,
    ) -> TransportWork:
        options = _c10d.AllToAllOptions()
        options.asyncOp = async_op
        splits = (list(output_splits), list(input_splits))
        return _work(self._transport.alltoall_base(output, input, *splits, options))

    def send(self, tensor: torch.Tensor, dst_rank: int, tag: int) -> TransportWork:
        return _work(self._transport.send([tensor], dst_rank, tag))

    def recv(self, tensor: torch.Tensor, src_rank: int, tag: int) -> TransportWork:
        return _work(self._transport.recv([tensor], src_rank, tag))

    def shutdown(self) -> None:
        if not self._is_adopted:
            self._transport.shutdown()

    def _barrier(self, device_ids: Sequence[int] = ()) -> TransportWork:
        options = _c10d.BarrierOptions()
        options.device_ids = list(device_ids)
        options.asyncOp = False
        return _work(self._transport.barrier(options))


def _work(started: TransportWork | None) -> TransportWork:
    """NCCL has no handle for what it has queued on the caller's own stream: there it is in order already."""
    return CompletedWork() if started is None else started
