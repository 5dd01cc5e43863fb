"""Gloo: CPU tensors over TCP."""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import torch

from disttrain.errors import BackendError
from disttrain.process_group import _c10d
from disttrain.process_group._c10d import Reduction
from disttrain.process_group.backends.base import Membership
from disttrain.process_group.backends.c10d_backend import C10dBackend, in_a_row, unseen
from disttrain.process_group.backends.c10d_work import Finish, FinishingWork, InterruptibleWork, num_under_way
from disttrain.process_group.backends.gloo_direct import (
    DirectWork,
    Exchange,
    Parts,
    SizeExchange,
    combine,
    gathers_directly,
    reduces_directly,
)
from disttrain.process_group.backends.gloo_failures import GLOO_FAILURES
from disttrain.process_group.backends.reduction import Emulation, Natives
from disttrain.process_group.work import JoinedWork, TransportWork
from disttrain.settings import GLOO_SOCKET_IFNAME, MASTER_ADDR

_log = logging.getLogger(__name__)

_FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
_INTEGERS = frozenset({torch.int8, torch.int32, torch.int64, torch.uint8})
_TAKES_LISTS: Final = torch.__version__ >= "2.13"
"""The Gloo of torch 2.11 has no all-to-all of lists."""


class GlooBackend(C10dBackend):
    _num_failures = 0
    """The number of Gloo's threads that had failed when this transport was made."""
    _spans_hosts = False
    devices = ("cpu",)
    natives = Natives(
        _FLOATS | _INTEGERS, averages=_FLOATS, premultiplies=frozenset(), is_bitwise=True, keeps_nans=False
    )

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        interfaces = GLOO_SOCKET_IFNAME.read() or ()
        existing = {name for _, name in socket.if_nameindex()}
        if unknown := [name for name in interfaces if name not in existing]:
            raise BackendError(
                "gloo",
                f"{GLOO_SOCKET_IFNAME.name} names {', '.join(unknown)}; there are {', '.join(sorted(existing))}.",
                "Name one that all nodes of the job can be reached by.",
                rank=membership.global_rank,
            )
        GLOO_FAILURES.watch()
        self._num_failures = GLOO_FAILURES.num_failures
        deadline_s = time.monotonic() + membership.timeout_s
        self._transport = _c10d.make_gloo(
            self._store, membership.rank, membership.size, membership.timeout_s, _listening_address(), interfaces
        )
        self._meet(deadline_s)
        self._spans_hosts = membership.spans_hosts()

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> TransportWork:
        if not (self._spans_hosts and reduces_directly(tensor, self._size)):
            return super().all_reduce(tensor, op, async_op)
        _, emulation = self._reduction("all_reduce", _c10d.AllreduceOptions, tensor.dtype, op, async_op)
        term = in_a_row(tensor if emulation is None else emulation.multiplied(emulation.seen(tensor)))
        return self._reduced(term.expand(self._size, -1), tensor, op, emulation)

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> TransportWork:
        # Gloo compares the shapes of parts, and takes no output that stacks them.
        whole, part = in_a_row(output), in_a_row(input)
        if not self._has_others or not gathers_directly(part, self._size):
            return self._sized(super().all_gather_into_tensor(whole, part, async_op), part)
        return self._gathered([whole.view(self._size, -1)], part)

    def all_gather(self, outputs: Sequence[torch.Tensor], input: torch.Tensor, async_op: bool) -> TransportWork:
        if [output.numel() for output in outputs].count(input.numel()) == len(outputs):
            if self._has_others and gathers_directly(input, self._size):
                return self._gathered([output.view(1, -1) for output in outputs], in_a_row(input))
            return self._sized(super().all_gather(outputs, input, async_op), input)
        # Gloo gathers equal parts only. The outputs say to all ranks alike that these are not.
        unseen(outputs[self._rank]).view(-1).copy_(input.view(-1))
        return JoinedWork([self.broadcast(output, rank, async_op) for rank, output in enumerate(outputs)])

    def reduces_sparse(self, tensor: torch.Tensor, op: Reduction) -> bool:
        return tensor.is_sparse and tensor.dtype in self.natives.dtypes and op == _c10d.ReduceOp.SUM

    def all_reduce_tensors(self, tensors: Sequence[torch.Tensor], op: Reduction, async_op: bool) -> TransportWork:
        emulations = [self._emulation("all_reduce", tensor.dtype, op) for tensor in tensors]
        ops = [op if emulation is None else emulation.op for emulation in emulations]
        pairs = list(zip(tensors, emulations, strict=True))
        seen = [unseen(tensor if emulation is None else emulation.seen(tensor)) for tensor, emulation in pairs]
        if len({tensor.dtype for tensor in seen}) > 1 or any(other != ops[0] for other in ops):
            return super().all_reduce_tensors(tensors, op, async_op)
        for part, emulation in zip(seen, emulations, strict=True):
            if emulation is not None and emulation.factor is not None:
                part.mul_(emulation.factor)
        options = _c10d.AllreduceCoalescedOptions()
        options.reduceOp = ops[0]  # type: ignore[assignment]
        options.asyncOp = async_op
        started = self._transport.allreduce_coalesced(seen, options)
        if all(emulation is None or emulation.only_views(op) for emulation in emulations):
            return self._begun(started)

        def finish() -> Sequence[torch.Tensor]:
            for (tensor, emulation), part in zip(pairs, seen, strict=True):
                if emulation is not None:
                    emulation.finish(part, tensor, self._size)
            return tensors

        return self._begun(started, finish)

    def all_gather_lists(
        self, output_lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> TransportWork:
        shapes = [tensor.shape for tensor in inputs]
        alike = all([tensor.shape for tensor in outputs] == shapes for outputs in output_lists)
        if not alike or len({tensor.dtype for tensor in inputs}) > 1:
            return super().all_gather_lists(output_lists, inputs, async_op)
        options = self._options(_c10d.AllgatherOptions, async_op)
        moved = [[self._movable(tensor) for tensor in tensors] for tensors in (*output_lists, inputs)]
        return self._begun(self._transport.allgather_coalesced(moved[:-1], moved[-1], options))

    def reduce_scatter_tensor(
        self, output: torch.Tensor, input: torch.Tensor, op: Reduction, async_op: bool
    ) -> TransportWork:
        # torch's Gloo has an all-reduce instead, whose handle does not say when it is done, and cannot be given up.
        _, emulation = self._reduction("reduce_scatter_tensor", _c10d.ReduceScatterOptions, output.dtype, op, async_op)
        sent = in_a_row(input if emulation is None else emulation.multiplied(emulation.seen(input))).view(
            self._size, -1
        )
        return self._reduced(sent, output, op, emulation)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Reduction, async_op: bool
    ) -> TransportWork:
        _, emulation = self._reduction("reduce_scatter", _c10d.ReduceScatterOptions, output.dtype, op, async_op)
        sent = [in_a_row(each if emulation is None else emulation.multiplied(emulation.seen(each))) for each in inputs]
        return self._reduced(sent, output, op, emulation)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> TransportWork:
        num_elements = [*map(torch.Tensor.numel, outputs), *map(torch.Tensor.numel, inputs)]
        if _TAKES_LISTS and num_elements.count(num_elements[0]) == len(num_elements):
            # Of one size, Gloo takes them as they are. It sends the same to ranks where they are not.
            options = self._options(_c10d.AllToAllOptions, async_op)
            return self._begun(self._transport.alltoall(self._all_flat(outputs), self._all_flat(inputs), options))
        joined = torch.cat([tensor.view(-1) for tensor in inputs])
        sizes = [tensor.numel() for tensor in outputs]
        received = joined.new_empty(sum(sizes))

        def finish() -> Sequence[torch.Tensor]:
            for tensor, part in zip(outputs, received.split(sizes), strict=True):
                tensor.view(-1).copy_(part)
            return outputs

        started = self.all_to_all_single(received, joined, sizes, [tensor.numel() for tensor in inputs], async_op)
        return FinishingWork(started, finish)

    def _reduced(self, parts: Parts, result: torch.Tensor, op: Reduction, emulation: Emulation | None) -> TransportWork:
        """Send each rank its part, and reduce what comes into `result`."""
        seen = result if emulation is None else emulation.seen(result)
        exchange = self._exchange(parts, seen)

        def finish() -> Sequence[torch.Tensor]:
            combine(exchange.result(self._scope).unbind(), op if emulation is None else emulation.op, in_a_row(seen))
            return (result,) if emulation is None else emulation.finish(seen, result, self._size)

        return DirectWork(exchange.work, finish)

    def _gathered(self, outputs: Sequence[torch.Tensor], part: torch.Tensor) -> TransportWork:
        """Send each rank the flat `part`. What comes goes into `outputs`, each (ranks, elements), one after another."""
        exchange = self._exchange(part.expand(self._size, -1), part)

        def finish() -> Sequence[torch.Tensor]:
            parts = exchange.result(self._scope).split([output.shape[0] for output in outputs])
            # As in `combine`.
            with torch.inference_mode():
                for output, rows in zip(outputs, parts, strict=True):
                    output.data.copy_(rows)
            return outputs

        return DirectWork(exchange.work, finish)

    @property
    def _has_others(self) -> bool:
        return self._size > 1

    def _sized(self, started: TransportWork, part: torch.Tensor) -> TransportWork:
        """A ring's all-gather, once all ranks have said that they gave as much as this one's `part`."""
        if not self._has_others:
            return started
        sizes = SizeExchange([part] * self._size, self._start)
        return DirectWork(JoinedWork([started, sizes.work]), lambda: sizes.check(part, self._scope))

    def _exchange(self, parts: Parts, like: torch.Tensor) -> Exchange:
        # Autograd does not see it.
        detached = parts.detach() if isinstance(parts, torch.Tensor) else [part.detach() for part in parts]
        return Exchange(detached, like, self._size, self._start)

    def _start(
        self, received: torch.Tensor, sent: torch.Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> TransportWork:
        """Begin an all-to-all of flat tensors, of parts of these sizes, or of equal ones if there are none."""
        options = self._options(_c10d.AllToAllOptions, True)
        moved = self._movable(received), self._movable(sent)
        return self._begun(self._transport.alltoall_base(*moved, received_sizes, sent_sizes, options))

    def barrier(self, device: torch.device) -> TransportWork:
        return self._barrier()

    def shutdown(self, wait_s: float) -> None:
        """Let go of the transport, once what nobody has waited for has ended, or after `wait_s`."""
        self._scope.is_given_up = True
        if num_left := num_under_way(self._scope.dropped, wait_s):
            _log.warning(
                "rank %d has not waited for collectives, %d under way in the group that it lets go of: they may "
                "not take place. Keep the handle that async_op=True gives, and wait for it.",
                self._global_rank,
                num_left,
            )
            # Its destructor would wait until their timeout.
            _c10d.keep_for_good(self._transport)
        if not self._is_stuck():
            super().shutdown(wait_s)

    def abort(self) -> None:
        self._scope.is_given_up = True
        if self._is_stuck():
            # Whoever uses the group gets an error that says why it has ended; others need not hear of it.
            GLOO_FAILURES.acknowledge()
            GLOO_FAILURES.settle()
        else:
            super().abort()

    def _is_stuck(self) -> bool:
        """True when a thread of Gloo, perhaps this transport's, stays where it has failed, and would be waited for."""
        has_failed = GLOO_FAILURES.num_failures > self._num_failures
        if has_failed:
            _c10d.keep_for_good(self._transport)
        return has_failed

    def _meet(self, deadline_s: float) -> None:
        """Wait until all have connected to all. Connecting and this have one timeout.

        Else a leaf of a broadcast's tree, which has its part and lets go of the group, breaks it for those that have
        not met it yet.
        """
        # Where it is over Gloo hangs up on the others, so that they fail as well. (No time at all would be no timeout.)
        met = self._barrier(timeout=timedelta(seconds=max(deadline_s - time.monotonic(), 1e-3)))
        try:
            met.wait()
        except BaseException:
            if not met.is_completed():
                _c10d.keep_for_good(self._transport)  # nobody shuts it down, and its destructor would wait
            raise

    def _begun(self, started: TransportWork | None, finish: Finish | None = None) -> TransportWork:
        assert started is not None
        return super()._begun(InterruptibleWork(started, self._scope, self._transport), finish)

    @classmethod
    def is_available(cls) -> bool:
        return _c10d.gloo_is_available()


def _listening_address() -> str | None:
    """The host to listen at where no interface is named: loopback for a job on loopback; None is this host's name."""
    master_addr = MASTER_ADDR.read()
    if master_addr == "localhost":
        return "127.0.0.1"
    try:
        is_loopback = master_addr is not None and ipaddress.ip_address(master_addr).is_loopback
    except ValueError:
        is_loopback = False
    return master_addr if is_loopback else None
