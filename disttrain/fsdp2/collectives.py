"""The two collectives of a group of parameters: gather all of them at once, reduce all of their gradients at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from disttrain.fsdp2._torch import chunk_cat
from disttrain.fsdp2.flat import FlatPlan
from disttrain.fsdp2.streams import CommStreams
from disttrain.process_group import ProcessGroup, ReduceOp, Work, all_gather_into_tensor, reduce_scatter_tensor


@dataclass
class Gather:
    """An all-gather under way. Row r of `output` is rank r's flat buffer."""

    output: torch.Tensor
    work: Work | None
    done: torch.cuda.Event | None

    def wait(self, streams: CommStreams) -> None:
        """Order the current stream (CPU: the host) after it."""
        if self.work is not None:
            self.work.wait()
        streams.follow(self.done)


@dataclass
class Reduction:
    """A reduce-scatter under way. `output` is this rank's flat buffer of averaged gradients.

    `packed`, its input, was allocated on another stream: it is held until that stream is ordered after the reduction.
    """

    output: torch.Tensor
    packed: torch.Tensor
    work: Work | None
    done: torch.cuda.Event | None

    def wait(self, streams: CommStreams) -> None:
        """Order the current stream (CPU: the host) after it; the packed input may be reused then."""
        if self.work is not None:
            self.work.wait()
        streams.follow(self.done)


def start_gather(
    shard: torch.Tensor, dtype: torch.dtype, num_shards: int, group: ProcessGroup, streams: CommStreams
) -> Gather:
    """Gather every rank's flat `shard`, cast to `dtype`, on the all-gather stream. Collective."""
    # Whatever has written to the shards, such as an optimizer, has done so on the current stream.
    written = streams.mark()
    with streams.gathering():
        streams.follow(written)
        sent = shard if shard.dtype == dtype else shard.to(dtype)
        output = sent.new_empty((num_shards, sent.numel()))
        # On CUDA a collective that is not asynchronous runs on the current stream, here the all-gather stream.
        work = all_gather_into_tensor(output, sent, group=group, async_op=not streams.is_cuda)
        return Gather(output, work, streams.mark())


def copy_out(gathered: torch.Tensor, plan: FlatPlan, buffers: Sequence[torch.Tensor]) -> None:
    """Spread gathered rows over the parameters' own buffers, each (num_shards, padded elements)."""
    torch.split_with_sizes_copy(gathered, plan.split_sizes, dim=1, out=list(buffers))


def start_reduction(
    grads: Sequence[torch.Tensor], plan: FlatPlan, dtype: torch.dtype, group: ProcessGroup, streams: CommStreams
) -> Reduction:
    """Average whole gradients over the ranks, scatter them as flat shards, on the reduce-scatter stream. Collective."""
    packed = torch.empty((plan.num_shards, plan.shard_numel), dtype=dtype, device=grads[0].device)
    chunk_cat(grads, plan.num_shards, out=packed)
    copied_in = streams.mark()
    with streams.reducing():
        streams.follow(copied_in)
        output = packed.new_empty(plan.shard_numel)
        work = reduce_scatter_tensor(output, packed, ReduceOp.AVG, group=group, async_op=not streams.is_cuda)
        return Reduction(output, packed, work, streams.mark())
