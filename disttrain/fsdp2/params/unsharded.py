"""The gathered parameters of a group: one storage that is allocated and freed as a whole, and the tensors in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from disttrain.dtensor import DTensor, Spec
from disttrain.fsdp2.params.flat import FlatPlan, FlatSlot
from disttrain.fsdp2.params.param import ShardedParam
from disttrain.kernels.copies.operator import unpack_rows

_ALIGNMENT_BYTES = 256
"""The alignment of a parameter's start: that of torch's allocator, which kernels with wide loads require."""


def unsharded_offsets(params: Sequence[ShardedParam], plan: FlatPlan, dtype: torch.dtype) -> tuple[list[int], int]:
    """Returns where each unsharded parameter begins, and where the last one ends, in elements."""
    step = _ALIGNMENT_BYTES // dtype.itemsize
    offsets, end = [], 0
    for param, slot in zip(params, plan.slots, strict=True):
        offsets.append(end)
        end += -(-_place_numel(param, slot, plan) // step) * step
    return offsets, end


def _place_numel(param: ShardedParam, slot: FlatSlot, plan: FlatPlan) -> int:
    """Counts the elements that a parameter takes: where the first dim is cut, its padding follows it."""
    return plan.num_shards * slot.padded_numel if param.dim == 0 else slot.numel


class UnshardedParams:
    """Unsharded parameters in one storage, each in a place of its own.

    The parameters keep their identity from step to step, since autograd saves views of them: only the storage is
    resized. Where a parameter was a DTensor already, of another parallelism, the whole is this rank's part of that.
    """

    def __init__(
        self, params: Sequence[ShardedParam], plan: FlatPlan, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype, self.device = dtype, device
        self._params, self._plan = params, plan
        offsets, end = unsharded_offsets(params, plan, dtype)
        # What is made in inference mode could not be trained.
        with torch.inference_mode(False):
            memory = torch.empty(end, dtype=dtype, device=device)
            self._storage = memory.untyped_storage()
            self._num_bytes = self._storage.nbytes()
            self.places: list[torch.Tensor] = []
            """The places of gathered values: (num_shards, padded elements) each, or the whole if another dim is
            sharded."""
            self.parameters: list[nn.Parameter] = []
            for param, slot, offset in zip(params, plan.slots, offsets, strict=True):
                # `.data` gives each alias a version counter of its own: gathering again must not look like an in-place
                # change to autograd, which holds views of the parameter from the forward pass.
                view = memory.narrow(0, offset, _place_numel(param, slot, plan)).data
                local = view[: slot.numel].view(param.shape).data
                self.places.append(view.view(plan.num_shards, slot.padded_numel) if param.dim == 0 else local.data)
                whole = local if param.unsharded_spec is None else wrapped(local, param.unsharded_spec)
                self.parameters.append(nn.Parameter(whole, requires_grad=param.sharded.requires_grad))
        self.is_cut_in_front = all(param.dim == 0 for param in params)

    def allocate(self) -> None:
        """Have memory again."""
        if self._storage.nbytes() != self._num_bytes:
            self._storage.resize_(self._num_bytes)

    def free(self) -> None:
        """Frees the memory, except if `.numpy()` has made an array of it."""
        if self._storage.resizable():
            self._storage.resize_(0)

    def write(self, gathered: torch.Tensor, are_written: Sequence[bool] | None = None) -> None:
        """Take over the values of all shards' flat buffers, (num_shards, elements of a buffer): of all parameters, or
        of those that are not written yet."""
        sizes, places = self._plan.split_sizes, self.places
        if are_written is not None:
            missing = [index for index, is_written in enumerate(are_written) if not is_written]
            sizes, places = [sizes[index] for index in missing], [places[index] for index in missing]
        if self.is_cut_in_front:
            unpack_rows(gathered, sizes, places)
            return
        columns = gathered.split(self._plan.split_sizes, dim=1)
        for param, slot, view, rows in zip(self._params, self._plan.slots, self.places, columns, strict=True):
            if param.dim == 0:
                view.copy_(rows)
            else:
                padded = (self._plan.num_shards * slot.padded_rows, *slot.shape[1:])
                front = rows.reshape(padded).narrow(0, 0, slot.shape[0])
                view.copy_(front.movedim(0, param.dim))

    def part_on(self, shard_rank: int, num_ranks: int) -> torch.Tensor:
        """The flat buffers of the part of this rank, the holder of shard `shard_rank`, where `num_ranks` neighbours
        share the whole."""
        count = self._plan.num_shards // num_ranks
        with torch.inference_mode(False), torch.no_grad():
            return self._rows(shard_rank % num_ranks * count, count)

    def _rows(self, first: int, count: int) -> torch.Tensor:
        """A copy of the flat buffers of shards `first` to `first + count`."""
        columns = []
        for param, slot, view in zip(self._params, self._plan.slots, self.places, strict=True):
            if param.dim == 0:
                columns.append(view.narrow(0, first, count))
                continue
            front = view.movedim(param.dim, 0)
            start, stop = (min(shard * slot.padded_rows, slot.shape[0]) for shard in (first, first + count))
            rows = front.new_zeros((count * slot.padded_rows, *slot.shape[1:]))
            rows.narrow(0, 0, stop - start).copy_(front.narrow(0, start, stop - start))
            columns.append(rows.view(count, slot.padded_numel))
        return torch.cat(columns, dim=1)


def wrapped(local: torch.Tensor, spec: Spec) -> DTensor:
    """A whole of another parallelism, of which this rank computes with `local`."""
    return DTensor(local, Spec(spec.layout, spec.shape, spec.stride, local.dtype))
