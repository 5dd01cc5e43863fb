"""Gloo: CPU tensors over TCP."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Sequence

import torch

from disttrain.errors import ShapeError
from disttrain.process_group import _c10d
from disttrain.process_group._c10d import ReduceOp, Reduction
from disttrain.process_group.backends.base import Membership
from disttrain.process_group.backends.c10d_backend import C10dBackend
from disttrain.process_group.work import TransportWork
from disttrain.settings import GLOO_SOCKET_IFNAME, MASTER_ADDR

_REDUCIBLE = frozenset(
    {
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.uint8,
    }
)


class GlooBackend(C10dBackend):
    devices = ("cpu",)

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        self._transport = _c10d.make_gloo(
            self._store, membership.rank, membership.size, membership.timeout_s, _listening_address()
        )

    # Gloo knows few dtypes. What only moves data moves bytes, and so serves all of them.

    def broadcast(self, tensor: torch.Tensor, src_rank: int, async_op: bool) -> TransportWork:
        return super().broadcast(_bytes_of(tensor), src_rank, async_op)

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> TransportWork:
        return super().all_gather_into_tensor(_bytes_of(output), _bytes_of(input), async_op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        async_op: bool,
    ) -> TransportWork:
        row_bytes = input.dtype.itemsize * math.prod(input.shape[1:])
        received, sent = ([size * row_bytes for size in sizes] for sizes in (output_splits, input_splits))
        return super().all_to_all_single(_bytes_of(output), _bytes_of(input), received, sent, async_op)

    def send(self, tensor: torch.Tensor, dst_rank: int, tag: int) -> TransportWork:
        return super().send(_bytes_of(tensor), dst_rank, tag)

    def recv(self, tensor: torch.Tensor, src_rank: int, tag: int) -> TransportWork:
        return super().recv(_bytes_of(tensor), src_rank, tag)

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> TransportWork:
        self._check_can_reduce("all_reduce", tensor, op)
        return super().all_reduce(tensor, op, async_op)

    def reduce_scatter_tensor(
        self, output: torch.Tensor, input: torch.Tensor, op: Reduction, async_op: bool
    ) -> TransportWork:
        self._check_can_reduce("reduce_scatter_tensor", input, op)
        # Gloo splits along the leading dim only.
        return super().reduce_scatter_tensor(output.view(-1), input.view(-1), op, async_op)

    def barrier(self, device: torch.device) -> TransportWork:
        return self._barrier()

    def _check_can_reduce(self, operation: str, tensor: torch.Tensor, op: Reduction) -> None:
        # Gloo would find out in a thread of its own, and the group would be of no use afterwards.
        if tensor.dtype not in _REDUCIBLE or (op == ReduceOp.AVG and not tensor.is_floating_point()):
            name = str(tensor.dtype).removeprefix("torch.")
            raise ShapeError(
                operation,
                f"gloo cannot reduce {name} by this operation.",
                "Convert it to float32, float64, int32 or int64 first.",
                rank=self._global_rank,
            )

    @classmethod
    def is_available(cls) -> bool:
        return _c10d.gloo_is_available()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _listening_address() -> str | None:
    """Where to listen: the interface that the user names, loopback for a job on loopback, else as the host is named."""
    if GLOO_SOCKET_IFNAME.is_set():
        return None
    master_addr = MASTER_ADDR.read()
    if master_addr == "localhost":
        return "127.0.0.1"
    try:
        is_loopback = master_addr is not None and ipaddress.ip_address(master_addr).is_loopback
    except ValueError:
        is_loopback = False
    return master_addr if is_loopback else None
