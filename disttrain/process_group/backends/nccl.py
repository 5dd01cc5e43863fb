"""NCCL: CUDA tensors over NVLink, InfiniBand or TCP."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disttrain.errors import BackendError
from disttrain.process_group import _c10d
from disttrain.process_group._c10d import Reduction
from disttrain.process_group.backends.base import AnySourceWork, CompletedWork, Membership
from disttrain.process_group.backends.c10d_backend import C10dBackend
from disttrain.process_group.backends.reduction import Natives
from disttrain.process_group.work import TransportWork

_FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
_DTYPES = _FLOATS | {torch.int8, torch.int32, torch.int64, torch.uint8}


class NcclBackend(C10dBackend):
    devices = ("cuda",)
    coalesces = True
    reports_absent = False
    # torch 2.11 reads a factor for bfloat16 wrongly, and sums up zeros.
    natives = Natives(_DTYPES, averages=_DTYPES, premultiplies=_FLOATS - {torch.bfloat16}, is_bitwise=False)

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        self._transport = _c10d.make_nccl(
            self._store,
            membership.rank,
            membership.size,
            membership.timeout_s,
            membership.ranks,
            membership.name,
        )

    def barrier(self, device: torch.device) -> TransportWork:
        return self._barrier([device.index])

    def recv_any(self, tensor: torch.Tensor, tag: int) -> AnySourceWork:
        raise BackendError(
            "recv",
            "nccl cannot receive from any source.",
            "Say from whom, by src or group_src.",
            rank=self._global_rank,
        )

    def all_gather_into_tensors(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> TransportWork:
        options, transport = self._options(_c10d.AllgatherOptions, async_op), self._transport
        transport._start_coalescing()
        for output, input_ in zip(outputs, inputs, strict=True):
            transport._allgather_base(self._movable(output), self._movable(input_), options)
        return self._begun(transport._end_coalescing())

    def reduce_scatter_tensors(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: Reduction, async_op: bool
    ) -> TransportWork:
        dtypes = {tensor.dtype for tensor in inputs}
        options, emulation = self._reduction(
            "reduce_scatter_tensor_coalesced", _c10d.ReduceScatterOptions, inputs[0].dtype, op, async_op
        )
        if len(dtypes) > 1 or emulation is not None:
            return super().reduce_scatter_tensors(outputs, inputs, op, async_op)
        transport = self._transport
        transport._start_coalescing()
        for output, input_ in zip(outputs, inputs, strict=True):
            transport._reduce_scatter_base(output, input_, options)
        return self._begun(transport._end_coalescing())

    def start_coalescing(self) -> None:
        self._transport._start_coalescing()
        self._is_coalescing = True

    def end_coalescing(self) -> TransportWork:
        self._is_coalescing = False
        return self._handle(self._transport._end_coalescing())

    def _handle(self, started: TransportWork | None) -> TransportWork:
        # Nothing has been launched yet while coalescing: the handle of the whole is the one to wait for.
        return CompletedWork() if self._is_coalescing else super()._handle(started)

    @classmethod
    def is_available(cls) -> bool:
        return _c10d.nccl_is_available()
