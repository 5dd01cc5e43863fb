"""The calls of torch's `c10d::Backend`, which Gloo and NCCL share.

Operations that only move data move bytes where the transport does not know the dtype. Reductions follow `reduction.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch

from disttrain.process_group import _c10d
from disttrain.process_group._c10d import Reduction, Transport
from disttrain.process_group.backends.base import AnySourceWork, Backend, CompletedWork, Membership
from disttrain.process_group.backends.c10d_work import Finish, FinishingWork
from disttrain.process_group.backends.reduction import Emulation, Natives, emulation_for
from disttrain.process_group.work import TransportWork

_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
_ENUMERATORS = frozenset(map(id, _c10d.ReduceOp.RedOpType.__members__.values()))

Prepared = tuple[Any, Emulation | None]
"""Options for a transport's reduction, and how to reduce what it doesn't know."""


class C10dBackend(Backend):
    """Calls a C++ transport. Abstract: subclasses make `_transport`."""

    natives: ClassVar[Natives]
    _transport: Transport
    _is_adopted = False

    def __init__(self, membership: Membership) -> None:
        self._scope = membership.scope
        self._store = _c10d.StoreAdapter(membership.store, lambda: _still_waits(membership))
        self._rank = membership.rank
        self._size = membership.size
        self._global_rank = membership.global_rank
        self._is_coalescing = False
        # C++ objects that say only whether it is async and by what to reduce cost more to make than to look up.
        self._prepared: dict[tuple[type[Any], torch.dtype, int, bool, int | None], Prepared] = {}
        self._made_options: dict[tuple[type[Any], bool, int | None], Any] = {}

    @classmethod
    def adopting(cls, transport: Transport, membership: Membership) -> Self:
        """A backend on a transport that somebody else made, and shuts down."""
        made: Self = cls.__new__(cls)
        C10dBackend.__init__(made, membership)
        made._transport = transport
        made._is_adopted = True
        return made

    @property
    def transport(self) -> Transport:
        """The C++ half."""
        return self._transport

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> TransportWork:
        options, emulation = self._reduction("all_reduce", _c10d.AllreduceOptions, tensor.dtype, op, async_op)
        if emulation is None:
            return self._begun(self._transport.allreduce([unseen(tensor)], options))
        seen = unseen(emulation.seen(tensor))
        if emulation.factor is not None:
            seen.mul_(emulation.factor)
        started = self._transport.allreduce([seen], options)
        return self._begun(started, lambda: emulation.finish(seen, tensor, self._size))

    def reduce(self, tensor: torch.Tensor, dst_rank: int, op: Reduction, async_op: bool) -> TransportWork:
        options, emulation = self._reduction("reduce", _c10d.ReduceOptions, tensor.dtype, op, async_op, dst_rank)
        is_root = self._rank == dst_rank
        if emulation is None:
            # Transports leave partial sums in the tensors of the others.
            return self._begun(
                self._transport.reduce([unseen(tensor) if is_root else tensor.detach().clone()], options)
            )
        seen = unseen(emulation.multiplied(emulation.seen(tensor)))
        if not is_root:
            contribution = seen.clone() if seen.data_ptr() == tensor.data_ptr() else seen
            return self._begun(self._transport.reduce([contribution], options))

        def finish() -> Sequence[torch.Tensor]:
            emulation.finish(seen, tensor, self._size)
            if emulation.factor is not None:
                emulation.seen(tensor).copy_(seen)
            return [tensor]

        return self._begun(self._transport.reduce([seen], options), finish)

    def broadcast(self, tensor: torch.Tensor, src_rank: int, async_op: bool) -> TransportWork:
        options = self._options(_c10d.BroadcastOptions, async_op, src_rank)
        return self._begun(self._transport.broadcast([self._movable(tensor)], options))

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> TransportWork:
        options = self._options(_c10d.AllgatherOptions, async_op)
        started = self._transport._allgather_base(self._movable(output), self._movable(input), options)
        return self._begun(started)

    def all_gather(self, outputs: Sequence[torch.Tensor], input: torch.Tensor, async_op: bool) -> TransportWork:
        options = self._options(_c10d.AllgatherOptions, async_op)
        shape = input.shape
        if [output.shape for output in outputs].count(shape) == len(outputs):
            moved = [self._movable(output) for output in outputs]
            return self._begun(self._transport.allgather([moved], [self._movable(input)], options))
        return self._begun(self._transport.allgather([self._all_flat(outputs)], [self._flat(input)], options))

    def gather(
        self, input: torch.Tensor, outputs: Sequence[torch.Tensor], dst_rank: int, async_op: bool
    ) -> TransportWork:
        options = self._options(_c10d.GatherOptions, async_op, dst_rank)
        lists = [self._all_flat(outputs)] if outputs else []
        return self._begun(self._transport.gather(lists, [self._flat(input)], options))

    def scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], src_rank: int, async_op: bool
    ) -> TransportWork:
        options = self._options(_c10d.ScatterOptions, async_op, src_rank)
        lists = [self._all_flat(inputs)] if inputs else []
        return self._begun(self._transport.scatter([self._flat(output)], lists, options))

    def reduce_scatter_tensor(
        self, output: torch.Tensor, input: torch.Tensor, op: Reduction, async_op: bool
    ) -> TransportWork:
        # Gloo splits along the leading dim only.
        whole, flat = in_a_row(input), in_a_row(output)
        options, emulation = self._reduction(
            "reduce_scatter_tensor", _c10d.ReduceScatterOptions, whole.dtype, op, async_op
        )
        if emulation is None:
            return self._begun(self._transport._reduce_scatter_base(flat, whole, options))
        seen = emulation.seen(flat).view(-1)
        contribution = emulation.multiplied(emulation.seen(whole).view(-1))
        started = self._transport._reduce_scatter_base(seen, contribution, options)
        return self._begun(started, lambda: emulation.finish(seen, flat, self._size))

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Reduction, async_op: bool
    ) -> TransportWork:
        options, emulation = self._reduction("reduce_scatter", _c10d.ReduceScatterOptions, output.dtype, op, async_op)
        flat = in_a_row(output)
        if emulation is None:
            return self._begun(self._transport.reduce_scatter([flat], [self._all_flat(inputs)], options))
        seen = in_a_row(emulation.seen(flat))
        contributions = [emulation.multiplied(in_a_row(emulation.seen(in_a_row(tensor)))) for tensor in inputs]
        started = self._transport.reduce_scatter([seen], [contributions], options)
        return self._begun(started, lambda: emulation.finish(seen, flat, self._size))

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> TransportWork:
        options = self._options(_c10d.AllToAllOptions, async_op)
        moved = [[self._movable(tensor) for tensor in tensors] for tensors in (outputs, inputs)]
        return self._begun(self._transport.alltoall(*moved, options))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        async_op: bool,
    ) -> TransportWork:
        options = self._options(_c10d.AllToAllOptions, async_op)
        num_rows, size = output_splits[0], self._size
        if output_splits.count(num_rows) == size and input_splits.count(num_rows) == size:
            # Equal parts need no sizes, which would be told in elements.
            whole, sent = self._movable(output), self._movable(input)
            return self._begun(self._transport.alltoall_base(whole, sent, [], [], options))
        moved = []
        for tensor, splits in ((output, output_splits), (input, input_splits)):
            flat = self._flat(tensor)
            row_size = math.prod(tensor.shape[1:]) * tensor.element_size() // flat.element_size()
            moved.append((flat, [rows * row_size for rows in splits]))
        (flat_output, output_sizes), (flat_input, input_sizes) = moved
        started = self._transport.alltoall_base(flat_output, flat_input, output_sizes, input_sizes, options)
        return self._begun(started)

    def send(self, tensor: torch.Tensor, dst_rank: int, tag: int) -> TransportWork:
        return self._handle(self._transport.send([self._movable(tensor)], dst_rank, tag))

    def recv(self, tensor: torch.Tensor, src_rank: int, tag: int) -> TransportWork:
        return self._handle(self._transport.recv([self._movable(tensor)], src_rank, tag))

    def recv_any(self, tensor: torch.Tensor, tag: int) -> AnySourceWork:
        started: AnySourceWork = self._transport.recv_anysource([self._movable(tensor)], tag)
        return started

    def set_timeout(self, timeout_s: float) -> None:
        self._transport._set_default_timeout(timedelta(seconds=timeout_s))

    def shutdown(self, wait_s: float) -> None:
        if not self._is_adopted:
            self._transport.shutdown()

    def abort(self) -> None:
        if not self._is_adopted:
            self._transport.abort()

    def _begun(self, started: TransportWork | None, finish: Finish | None = None) -> TransportWork:
        """The handle of a collective; `finish` runs when the caller has waited for it."""
        handle = self._handle(started)
        return handle if finish is None else FinishingWork(handle, finish)

    def _handle(self, started: TransportWork | None) -> TransportWork:
        """NCCL has no handle for what it has queued on the caller's own stream: there it is in order already."""
        return CompletedWork() if started is None else started

    def _movable(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = unseen(tensor)
        if tensor.dtype in self.natives.dtypes:
            return tensor
        if tensor.dtype in _COMPLEX and tensor.dtype.to_real() in self.natives.dtypes:
            return torch.view_as_real(tensor)
        return tensor.view(-1).view(torch.uint8)

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """All that is to be moved, as one dim."""
        return in_a_row(self._movable(tensor))

    def _all_flat(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As `_flat`, of tensors of one dtype."""
        if tensors[0].dtype in self.natives.dtypes:
            return [in_a_row(unseen(tensor)) for tensor in tensors]
        return [self._flat(tensor) for tensor in tensors]

    def _options(self, kind: type[Any], async_op: bool, root_rank: int | None = None) -> Any:
        """Options of class `kind` that say these two alone."""
        options = self._made_options.get((kind, async_op, root_rank))
        if options is None:
            options = self._made_options[kind, async_op, root_rank] = _new_options(kind, async_op, root_rank)
        return options

    def _reduction(
        self,
        operation: str,
        kind: type[Any],
        dtype: torch.dtype,
        op: Reduction,
        async_op: bool,
        root_rank: int | None = None,
    ) -> Prepared:
        """Options of class `kind` to reduce `dtype` by `op`, and what the transport cannot do by itself."""
        # By identity: torch's enumerators live as long as their class, and take a microsecond to hash.
        prepared = self._prepared.get((kind, dtype, id(op), async_op, root_rank))
        if prepared is None:
            emulation = self._emulation(operation, dtype, op)
            prepared = _new_options(kind, async_op, root_rank), emulation
            prepared[0].reduceOp = op if emulation is None else emulation.op
            if id(op) in _ENUMERATORS:
                self._prepared[kind, dtype, id(op), async_op, root_rank] = prepared
        return prepared

    def _emulation(self, operation: str, dtype: torch.dtype, op: Reduction) -> Emulation | None:
        return emulation_for(operation, dtype, op, self.natives, self.short_name(), self._global_rank)

    def _barrier(self, device_ids: Sequence[int] = (), timeout: timedelta | None = None) -> TransportWork:
        """`timeout` None: the group's."""
        options = _c10d.BarrierOptions()
        if timeout is not None:
            options.timeout = timeout
        options.device_ids = list(device_ids)
        options.asyncOp = False
        return self._begun(self._transport.barrier(options))


def _still_waits(membership: Membership) -> None:
    """The transport waits for others in the store, for a while already."""
    membership.ask_others()
    membership.scope.check()


def unseen(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory for a transport, some of whose writes autograd would see."""
    return tensor.detach() if tensor.requires_grad else tensor


def in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.view(-1)`, which takes as long as a collective's dispatch where there is one dim already."""
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _new_options(kind: type[Any], async_op: bool, root_rank: int | None) -> Any:
    options = kind()
    options.asyncOp = async_op
    if root_rank is not None:
        options.rootRank = root_rank
    return options
