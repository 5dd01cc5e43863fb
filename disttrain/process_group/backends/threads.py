"""Ranks as threads of one process, for tests, teaching and simulation: the collectives over a `Fabric`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from disttrain.errors import BackendError
from disttrain.process_group._c10d import ReduceOp, Reduction, reduction_factor, reduction_kind
from disttrain.process_group.backends.base import AnySourceWork, Backend, Membership
from disttrain.process_group.backends.fabric import Combine, Envelope, Fabric, FabricWork, Payload, copy_flat
from disttrain.process_group.backends.reduction import FOLDS, check_reducible
from disttrain.process_group.work import TransportWork

Pair = tuple[torch.Tensor, torch.Tensor]


class ThreadsBackend(Backend):
    """Collectives among threads. The world is made by `disttrain.testing.run_threads`."""

    devices = ("cpu", "cuda")
    reports_absent = False

    def __init__(self, membership: Membership) -> None:
        fabric = membership.options
        if not isinstance(fabric, Fabric):
            raise BackendError(
                "init_process_group",
                f"backend 'threads' needs pg_options=Fabric(world_size), not {fabric!r}.",
                "Let disttrain.testing.run_threads make the world.",
                rank=membership.global_rank,
            )
        self._fabric = fabric
        self._membership = membership
        self._num_collectives = 0

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> TransportWork:
        def combine(contributions: Sequence[Pair]) -> None:
            total = _reduce([pair[1] for pair in contributions], op)
            for target, _ in contributions:
                target.copy_(total)

        contribution = self._contribution("all_reduce", tensor, op)
        return self._meet(f"all_reduce {_op_name(op)} {_signature(tensor)}", (tensor, contribution), combine)

    def reduce(self, tensor: torch.Tensor, dst_rank: int, op: Reduction, async_op: bool) -> TransportWork:
        def combine(contributions: Sequence[Pair]) -> None:
            contributions[dst_rank][0].copy_(_reduce([pair[1] for pair in contributions], op))

        contribution = self._contribution("reduce", tensor, op)
        title = f"reduce {_op_name(op)} to group rank {dst_rank} {_signature(tensor)}"
        return self._meet(title, (tensor, contribution), combine)

    def broadcast(self, tensor: torch.Tensor, src_rank: int, async_op: bool) -> TransportWork:
        def combine(tensors: Sequence[torch.Tensor]) -> None:
            for member in tensors:
                copy_flat(member, tensors[src_rank])

        return self._meet(f"broadcast from group rank {src_rank} {_signature(tensor)}", tensor, combine)

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> TransportWork:
        def combine(pairs: Sequence[Pair]) -> None:
            gathered = torch.cat([pair[1].reshape(-1) for pair in pairs])
            for pair in pairs:
                copy_flat(pair[0], gathered)

        return self._meet(f"all_gather_into_tensor {_signature(input)}", (output, input), combine)

    def all_gather(self, outputs: Sequence[torch.Tensor], input: torch.Tensor, async_op: bool) -> TransportWork:
        def combine(lists: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]]) -> None:
            # One member's input may be another's output.
            gathered = [item[1].clone() for item in lists]
            for targets, _ in lists:
                for target, source in zip(targets, gathered, strict=True):
                    copy_flat(target, source)

        return self._meet(f"all_gather {_signatures(outputs)}", (outputs, input), combine)

    def gather(
        self, input: torch.Tensor, outputs: Sequence[torch.Tensor], dst_rank: int, async_op: bool
    ) -> TransportWork:
        def combine(lists: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]]) -> None:
            for target, (_, source) in zip(lists[dst_rank][0], lists, strict=True):
                copy_flat(target, source)

        return self._meet(f"gather to group rank {dst_rank} {_signature(input)}", (outputs, input), combine)

    def scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], src_rank: int, async_op: bool
    ) -> TransportWork:
        def combine(lists: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]]) -> None:
            for source, (target, _) in zip(lists[src_rank][1], lists, strict=True):
                copy_flat(target, source)

        return self._meet(f"scatter from group rank {src_rank} {_signature(output)}", (output, inputs), combine)

    def reduce_scatter_tensor(
        self, output: torch.Tensor, input: torch.Tensor, op: Reduction, async_op: bool
    ) -> TransportWork:
        def combine(pairs: Sequence[Pair]) -> None:
            parts = _reduce([pair[1].reshape(-1) for pair in pairs], op).view(len(pairs), -1)
            for pair, part in zip(pairs, parts, strict=True):
                pair[0].view(-1).copy_(part)

        contribution = self._contribution("reduce_scatter_tensor", input, op)
        title = f"reduce_scatter_tensor {_op_name(op)} {_signature(input)}"
        return self._meet(title, (output, contribution), combine)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Reduction, async_op: bool
    ) -> TransportWork:
        def combine(lists: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]]) -> None:
            totals = [_reduce([sources[rank] for _, sources in lists], op) for rank in range(len(lists))]
            for (target, _), total in zip(lists, totals, strict=True):
                target.view(-1).copy_(total.view(-1))

        contributions = [self._contribution("reduce_scatter", tensor, op) for tensor in inputs]
        title = f"reduce_scatter {_op_name(op)} {_signatures(inputs)}"
        return self._meet(title, (output, contributions), combine)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> TransportWork:
        return self._meet("all_to_all", (outputs, inputs), _exchange_lists)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        async_op: bool,
    ) -> TransportWork:
        parts = (output.split(list(output_splits)), input.split(list(input_splits)))
        return self._meet("all_to_all_single", parts, _exchange_lists)

    def barrier(self, device: torch.device) -> TransportWork:
        return self._meet("barrier", None, lambda _: None)

    def send(self, tensor: torch.Tensor, dst_rank: int, tag: int) -> TransportWork:
        return self._pass_message(Envelope(tensor, True, self._membership.rank), dst_rank, tag)

    def recv(self, tensor: torch.Tensor, src_rank: int, tag: int) -> TransportWork:
        return self._pass_message(Envelope(tensor, False, src_rank), self._membership.rank, tag)

    def recv_any(self, tensor: torch.Tensor, tag: int) -> AnySourceWork:
        return self._pass_message(Envelope(tensor, False, None), self._membership.rank, tag)

    def shutdown(self, wait_s: float) -> None:
        """Nothing to let go of: the threads are the caller's."""

    def _contribution(self, operation: str, tensor: torch.Tensor, op: Reduction) -> torch.Tensor:
        """This rank's term of a reduction."""
        check_reducible(operation, tensor.dtype, op, self._membership.global_rank)
        return tensor * reduction_factor(op) if reduction_kind(op) == ReduceOp.PREMUL_SUM else tensor

    def _meet(self, title: str, payload: Payload, combine: Combine[Payload]) -> TransportWork:
        membership = self._membership
        self._num_collectives += 1
        key: Hashable = (membership.name, self._num_collectives)
        operation = self._fabric.join(key, title, membership.size, membership.rank, payload, combine)
        return FabricWork(self._fabric, operation, membership.global_rank, membership.timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        self._membership = replace(self._membership, timeout_s=timeout_s)

    def _pass_message(self, envelope: Envelope, dst_rank: int, tag: int) -> FabricWork:
        membership = self._membership
        source = "any rank" if envelope.source_rank is None else f"group rank {envelope.source_rank}"
        title = f"message from {source} to {dst_rank}, tag {tag}, {_signature(envelope.tensor)}"
        operation = self._fabric.exchange((membership.name, dst_rank, tag), title, envelope)
        return FabricWork(self._fabric, operation, membership.global_rank, membership.timeout_s)


def _exchange_lists(lists: Sequence[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]) -> None:
    # All that is sent is taken before anything is received: a buffer may be both.
    sent = [[part.clone() for part in inputs] for _, inputs in lists]
    for rank, (outputs, _) in enumerate(lists):
        for output, inputs in zip(outputs, sent, strict=True):
            copy_flat(output, inputs[rank])


def _signature(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _signatures(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(_signature(tensor) for tensor in tensors)


def _op_name(op: Reduction) -> str:
    return reduction_kind(op).name


def _reduce(tensors: Sequence[torch.Tensor], op: Reduction) -> torch.Tensor:
    kind = reduction_kind(op)
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = FOLDS[kind](total, tensor)
    return total / len(tensors) if kind == ReduceOp.AVG else total
