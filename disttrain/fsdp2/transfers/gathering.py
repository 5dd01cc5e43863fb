"""Gathers under way: those of one group of parameters, or of several as one message."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch

from disttrain.fsdp2._torch import out_of_grad, out_of_inference
from disttrain.fsdp2.faults.lone_errors import tell_of
from disttrain.fsdp2.transfers.collectives import Gather, sent_numels, start_gather, start_gather_in_place
from disttrain.kernels.copies.operator import unpack_rows

if TYPE_CHECKING:
    from disttrain.fsdp2.params.param_group import ParamGroup
    from disttrain.fsdp2.transfers.comm import Comm


class Gathering:
    """A gather of some groups under way. Who waits for one of them has all: they came as one message."""

    def __init__(
        self,
        gather: Gather,
        groups: Sequence[ParamGroup],
        dtypes: Sequence[torch.dtype],
        are_in_place: Sequence[bool] | None,
        comm: Comm,
    ) -> None:
        """Of each group, what is gathered has come in one of `dtypes`; of one alone, parameters may be in their places,
        and not in the row."""
        self._gather = gather
        self._are_in_place = are_in_place
        self._groups = groups
        self._dtypes = dtypes
        self._comm = comm

    def finish(self) -> None:
        """Order the current stream (CPU: the host) after it, and let the groups have their values."""
        self._gather.wait(self._comm.streams)
        output = self._gather.output
        if output is not None:
            with out_of_inference(), out_of_grad():
                self._write(output)
            if not self._gather.is_shard:
                # The buffer belongs to the all-gather stream: it must not be handed out again while it is being read
                # here.
                self._comm.release_gathered()
                self._comm.copied_out = (output, self._comm.streams.mark())
        for group in self._groups:
            group.gathering = None

    def _write(self, output: torch.Tensor) -> None:
        unsharded = [group.allocated() for group in self._groups]
        if len(unsharded) == 1:
            unsharded[0].write(output, self._are_in_place)
        elif all(each.is_cut_in_front and each.dtype == output.dtype for each in unsharded):
            sizes = [*chain.from_iterable(group.plan.split_sizes for group in self._groups)]
            places = [*chain.from_iterable(each.places for each in unsharded)]
            unpack_rows(output, sizes, places)
        else:
            numels = sent_numels(self._gather.sent, self._dtypes)
            for group, each, columns in zip(self._groups, unsharded, output.split(numels, dim=1), strict=True):
                used = columns.narrow(1, 0, group.sent_numel * group.gather_dtype.itemsize // output.itemsize)
                each.write(used.view(group.gather_dtype))


def start_gathering(groups: Sequence[ParamGroup], comm: Comm) -> None:
    """Start to gather these groups, of which none is gathered or being gathered. Collective.

    On CUDA it follows what is on the current stream now, or `Comm.ready`.
    """
    first = groups[0]
    ready, comm.ready = comm.ready, None
    try:
        shards, dtypes = [group.to_send() for group in groups], [group.gather_dtype for group in groups]
    except Exception as error:
        tell_of("to gather", error, groups)
        raise
    group, streams, num_shards = first.gather_group(), comm.streams, first.sharding.num_shards
    # What has just been made is on the current stream: waiting for the optimizer alone would not do.
    ready = ready if ready is None or all(each.sends_shards for each in groups) else None
    in_place = None
    may_be_in_place = len(groups) == 1 and ready is None and first.is_gathered_in_place and not first.is_kept
    # Of a rank alone nothing comes: its shards are copied into their places when they are waited for.
    may_be_in_place = may_be_in_place and (group.size() > 1 or first.is_offloaded)
    if may_be_in_place and any(first.in_place):
        places = first.allocated().places
        plan, in_place = first.plan, first.in_place
        gather = start_gather_in_place(shards[0], dtypes[0], plan, places, in_place, group, streams)
    else:
        comm.release_gathered()
        gather = start_gather(shards, dtypes, first.device, num_shards, group, streams, ready)
    gathering = Gathering(gather, groups, dtypes, in_place, comm)
    for each in groups:
        each.gathering = gathering
        each.drop_part()
        if each.is_offloaded:
            comm.uploaded = gather.done
