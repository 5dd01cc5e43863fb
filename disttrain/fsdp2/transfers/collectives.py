"""The collectives of a group of parameters: gather all of them at once, reduce all of their gradients at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from disttrain.fsdp2.params.flat import FlatPlan, FlatSlot
from disttrain.fsdp2.params.sharding import Sharding
from disttrain.fsdp2.transfers.forms import ALIGNMENT_BYTES
from disttrain.fsdp2.transfers.streams import CommStreams
from disttrain.kernels.copies.operator import copy_all, pack_rows
from disttrain.process_group import (
    ProcessGroup,
    ReduceOp,
    Work,
    all_gather_into_tensor,
    all_gather_into_tensor_coalesced,
    all_reduce,
    reduce_scatter_tensor,
    reduce_scatter_tensor_coalesced,
)


@dataclass
class Gather:
    """An all-gather in progress. Row r of `output` is the data of shard r; None if all parameters are gathered into
    their places.

    `sent`, its input, may belong to the stream that computes. It is held until that stream waits for the gather.
    """

    sent: Sequence[torch.Tensor]
    output: torch.Tensor | None
    work: Work | None
    done: torch.Event | None
    is_shard: bool = False
    """Whether the output is the shard as it is, of a rank alone: who reads it casts it."""

    def wait(self, streams: CommStreams) -> None:
        """Order the current stream (CPU: the host) after it."""
        if self.work is not None:
            self.work.wait()
        streams.follow(self.done)


def start_gather(
    shards: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    num_shards: int,
    group: ProcessGroup,
    streams: CommStreams,
    ready: torch.Event | None,
) -> Gather:
    """Gather flat buffers, each cast to its dtype, as one message, on the all-gather stream. Collective.

    Each of `shards` is what this rank has of one group of parameters. One that is alone may be the flat buffers of
    several of the `num_shards` shards, one after the other, of which every rank of `group` has as many then. Buffers of
    several dtypes are gathered as bytes. A rank alone sends nothing: its shards are the output.
    """
    # Whatever has written to the shards, such as an optimizer, has done so on the current stream.
    written = streams.mark() if ready is None else ready
    if group.size() == 1 and len(shards) == 1 and shards[0].device == device:
        return Gather(shards, shards[0].view(num_shards, -1), None, written, is_shard=True)
    with streams.gathering():
        streams.follow(written)
        cast = [_brought(shard, dtype, device) for shard, dtype in zip(shards, dtypes, strict=True)]
        sent = _as_one(cast)
        if group.size() == 1:
            return Gather(shards, sent.view(num_shards, -1), None, streams.mark())
        output = sent.new_empty((num_shards, sent.numel() * group.size() // num_shards))
        # On CUDA a collective that is not asynchronous runs on the current stream, here the all-gather stream.
        work = all_gather_into_tensor(output, sent, group=group, async_op=not streams.is_cuda)
        return Gather(shards, output, work, streams.mark())


def start_gather_in_place(
    shard: torch.Tensor,
    dtype: torch.dtype,
    plan: FlatPlan,
    places: Sequence[torch.Tensor],
    are_in_place: Sequence[bool],
    group: ProcessGroup,
    streams: CommStreams,
) -> Gather:
    """Gather parameters right into their places, (num_shards, padded elements), and the rest, of those that are not to
    be `in_place`, as one message; all in one launch. Collective.

    The places must have been allocated on the current stream, so that earlier uses of that memory have ended at this
    point of it.
    """
    written = streams.mark()
    with streams.gathering():
        streams.follow(written)
        sent = _brought(shard, dtype, places[0].device)
        parts = sent.split(plan.split_sizes)
        pairs = [
            (target, part) for target, part, is_in_place in zip(places, parts, are_in_place, strict=True) if is_in_place
        ]
        rest = [part for part, is_in_place in zip(parts, are_in_place, strict=True) if not is_in_place]
        output = None
        if rest:
            together = torch.cat(rest)
            output = together.new_empty((plan.num_shards, together.numel()))
            pairs.append((output, together))
        pairs = [pair for pair in pairs if pair[1].numel()]
        outputs, inputs = [output for output, _ in pairs], [part for _, part in pairs]
        work = None
        if group.size() == 1:
            copy_all([output.view(-1) for output in outputs], inputs)
        elif pairs:
            work = all_gather_into_tensor_coalesced(outputs, inputs, group=group, async_op=not streams.is_cuda)
        # The cast copies belong to the all-gather stream, which could reuse them while a transport still reads them.
        return Gather((shard,) if streams.is_cuda else (shard, *inputs), output, work, streams.mark())


def sent_numels(shards: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[int]:
    """Counts the elements of a row of the gathered output that are each group's; bytes where dtypes differ."""
    if len(set(dtypes)) == 1:
        return [shard.numel() for shard in shards]
    return [_aligned(shard.numel() * dtype.itemsize) for shard, dtype in zip(shards, dtypes, strict=True)]


def _brought(shard: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    sent = shard if shard.device == device else shard.to(device, non_blocking=True)
    return sent if sent.dtype == dtype else sent.to(dtype)


def _as_one(parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    if len({part.dtype for part in parts}) == 1:
        return torch.cat(parts)
    return torch.cat([as_bytes(part) for part in parts])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, up to where the next one may begin."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, _aligned(flat.numel()) - flat.numel()))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class Averaging:
    """Factors that make averages of sums of gradients: before the sum they are divided by `before`, after it by
    `after`.

    `before` is None where the transport averages.
    """

    before: float | None = None
    after: float | None = None

    @classmethod
    def over(cls, sharding: Sharding, dtype: torch.dtype, factor: float | None, scale: float) -> Averaging:
        """Division by `factor`, or by the number of data ranks, and multiplication by `scale`."""
        if factor is None and dtype != torch.float16:
            rest = sharding.num_summed / scale
            return cls(None, None if rest == 1.0 else rest)
        whole = (sharding.num_data_ranks if factor is None else factor) / scale
        if dtype != torch.float16:
            return cls(1.0, whole)
        # In 16 bits sums may overflow and quotients underflow, so half of the division comes before the sum.
        before = 2.0 ** math.ceil(math.log2(max(whole, 1.0)) / 2)
        return cls(before, whole / before)


Hook = Callable[[torch.Tensor], None]


@dataclass
class Reduction:
    """A reduction under way: a reduce-scatter, and what follows it. `output` is this rank's flat buffer of averages.

    `packed`, its inputs, were allocated on another stream, and are held until that is ordered after the reduce-scatter;
    `held` was, too, and is until it is ordered after all.
    """

    output: torch.Tensor
    packed: Sequence[torch.Tensor]
    work: Work | None = None
    """The work that the host waits for, if there are no streams: the reduce-scatter, then the sum over the replicas."""
    scattered: torch.Event | None = None
    done: torch.Event | None = None
    sum_replicas: Callable[[], Work | None] | None = None
    """The work to start once the host has waited for the reduce-scatter, and ..."""
    rest: Callable[[], None] | None = None
    """... the work on `output` after that."""
    held: torch.Tensor | None = None
    has_sum: bool = False
    """Whether a sum over the replicas follows the reduce-scatter."""

    def wait_for_scatter(self, streams: CommStreams) -> None:
        """Order the current stream (CPU: the host) after the reduce-scatter, and let its input go. The sum over the
        replicas goes on beside what comes next."""
        if not self.packed:
            return
        if self.work is not None:
            self.work.wait()
        self.work, self.sum_replicas = self.sum_replicas() if self.sum_replicas is not None else None, None
        streams.follow(self.scattered)
        self.packed = ()

    def wait(self, streams: CommStreams) -> None:
        """Order the current stream (CPU: the host) after all of it."""
        self.wait_for_scatter(streams)
        work, rest, self.work, self.rest = self.work, self.rest, None, None
        if work is not None:
            work.wait()
        if rest is not None:
            rest()
        streams.follow(self.done)
        self.held = None

    def drop(self, streams: CommStreams) -> None:
        """Waits for a reduction whose result is not needed; parts of it that have not started are left out."""
        self.sum_replicas = self.rest = None
        self.wait(streams)


@dataclass(frozen=True)
class ReductionPlan:
    """Plan for packed gradients: averaged over the shards' ranks, and over those that hold copies."""

    sharding: Sharding
    group: ProcessGroup
    """The shards' ranks."""
    averaging: Averaging
    reduces_over_replicas: bool
    hook: Hook | None
    hook_stream: torch.cuda.Stream | None
    num_in_place: int
    """The number of gradients, from the first, that are reduced each by itself; the others are one message."""

    @property
    def op(self) -> ReduceOp.RedOpType:
        """The reduction that the transport does."""
        return ReduceOp.AVG if self.averaging.before is None else ReduceOp.SUM

    @property
    def has_sum(self) -> bool:
        """True where values are summed over the replicas."""
        return self.reduces_over_replicas and self.sharding.replicate_group is not None

    def has_rest(self, unreduced: torch.Tensor | None) -> bool:
        """True where the reduce-scatter is not all."""
        return unreduced is not None or self.has_sum or self.averaging.after is not None or self.hook is not None

    def changes_nothing(self, unreduced: torch.Tensor | None) -> bool:
        """True where a rank is alone, and gradients stay what they are."""
        is_kept = self.averaging.before in (None, 1.0) and not self.has_rest(unreduced)
        return is_kept and self.group.size() == 1 and self.sharding.replicate_group is None

    def sum_replicas(self, output: torch.Tensor, unreduced: torch.Tensor | None, *, async_op: bool) -> Work | None:
        """Sums over the replicas after the reduce-scatter, on the current stream; Work where `async_op`."""
        if unreduced is not None:
            output.add_(unreduced)
        if not self.has_sum:
            return None
        return all_reduce(output, self.op, group=self.sharding.replicate_group, async_op=async_op)

    def rest(self, output: torch.Tensor, streams: CommStreams) -> None:
        """Finishes the average after that, and calls the user's hook, on the current stream."""
        if self.averaging.after is not None and (self.reduces_over_replicas or self.sharding.replicate_group is None):
            output.div_(self.averaging.after)
        if self.hook is not None:
            with streams.on(self.hook_stream, output):
                self.hook(output)


def start_reduction(
    grads: Sequence[torch.Tensor],
    plan: FlatPlan,
    dtype: torch.dtype,
    reduction: ReductionPlan,
    unreduced: torch.Tensor | None,
    streams: CommStreams,
) -> Reduction:
    """Average unsharded gradients over the ranks, scatter them as flat shards, on their stream. Collective.

    `unreduced` are flat shards of earlier backward passes, which are still to be averaged over the replicas. Where no
    gradient has elements, nothing is done. A rank alone sends nothing: its packed gradients are the sums.
    """
    if plan.shard_numel == 0:
        return Reduction(grads[0].new_empty(0, dtype=dtype), ())
    packed, numels = _pack(grads, plan, dtype, reduction.num_in_place)
    if reduction.averaging.before not in (None, 1.0):
        for tensor in packed:
            tensor.div_(reduction.averaging.before)
    if reduction.group.size() == 1 and not reduction.has_rest(unreduced):
        return Reduction(_of_rank_alone(packed), ())
    copied_in = streams.mark()
    with streams.reducing():
        streams.follow(copied_in)
        work = None
        if reduction.group.size() == 1:
            output = _of_rank_alone(packed)
        else:
            output = packed[0].new_empty(plan.shard_numel)
            pairs = [(output, packed[0])]
            if len(packed) > 1:
                pairs = [pair for pair in zip(output.split(numels), packed, strict=True) if pair[1].numel()]
            work = _start_reduce_scatter(pairs, reduction, async_op=not streams.is_cuda)
        scattered = streams.mark()
    if not streams.is_cuda:
        return Reduction(
            output,
            packed,
            work,
            sum_replicas=lambda: reduction.sum_replicas(output, unreduced, async_op=True),
            rest=lambda: reduction.rest(output, streams),
            has_sum=reduction.has_sum,
        )
    if not reduction.has_rest(unreduced):
        return Reduction(output, packed, scattered=scattered)
    with streams.replicating():
        # A stream of its own lets the next reduce-scatter run beside the sum over the replicas.
        streams.follow(scattered)
        reduction.sum_replicas(output, unreduced, async_op=False)
        reduction.rest(output, streams)
        # The results of earlier passes were allocated on the stream that computes, and are read on this one.
        done = streams.mark()
        return Reduction(output, packed, scattered=scattered, done=done, held=unreduced, has_sum=reduction.has_sum)


def _of_rank_alone(packed: Sequence[torch.Tensor]) -> torch.Tensor:
    return packed[0].view(-1) if len(packed) == 1 else torch.cat([each.view(-1) for each in packed])


def _start_reduce_scatter(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], plan: ReductionPlan, *, async_op: bool
) -> Work | None:
    if len(pairs) == 1:
        ((output, packed),) = pairs
        return reduce_scatter_tensor(output, packed, plan.op, group=plan.group, async_op=async_op)
    outputs, inputs = [part for part, _ in pairs], [part for _, part in pairs]
    return reduce_scatter_tensor_coalesced(outputs, inputs, plan.op, group=plan.group, async_op=async_op)


def _pack(
    grads: Sequence[torch.Tensor], plan: FlatPlan, dtype: torch.dtype, num_in_place: int
) -> tuple[list[torch.Tensor], list[int]]:
    """Packs gradients: the first ones each by itself, the others as one. Returns also how much of a rank's buffer comes
    of each."""
    packed, numels = [], plan.split_sizes[:num_in_place]
    if num_in_place:
        packed = _in_places(grads[:num_in_place], plan.slots[:num_in_place], plan.num_shards, dtype)
    rest = plan.shard_numel - sum(numels)
    if num_in_place < len(grads):
        sizes = plan.split_sizes[num_in_place:]
        packed.append(_in_one(grads[num_in_place:], sizes, plan.num_shards, dtype, grads[0].device))
        numels = [*numels, rest]
    return packed, numels


def _in_one(
    grads: Sequence[torch.Tensor], sizes: Sequence[int], num_shards: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Gradients as rows of what each rank is to reduce, (num_shards, elements of a flat buffer)."""
    packed = torch.empty((num_shards, sum(sizes)), dtype=dtype, device=device)
    pack_rows(grads, sizes, packed)
    return packed


def _in_places(
    grads: Sequence[torch.Tensor], slots: Sequence[FlatSlot], num_shards: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Each gradient, cast and padded, by itself: (num_shards * padded elements)."""
    numels = [slot.padded_numel * num_shards for slot in slots]
    memory = torch.empty(sum(numels), dtype=dtype, device=grads[0].device)
    places = list(memory.split(numels))
    filled = []
    for view, grad, slot in zip(places, grads, slots, strict=True):
        has_padding = view.numel() > slot.numel
        if has_padding:
            view[slot.numel :].zero_()
        filled.append((view[: slot.numel] if has_padding else view).view(grad.shape))
    copy_all(filled, grads)
    return places
