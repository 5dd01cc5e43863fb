"""Parts of tensors between the ranks of a group, without gradients. What starts here is awaited later."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from disttrain.process_group import ProcessGroup, all_gather_into_tensor, reduce_scatter_tensor
from disttrain.process_group import all_reduce as all_reduce_
from disttrain.process_group.watching.ranges import named_in_traces

Finish = Callable[[], torch.Tensor]
"""Wait for what was started (CUDA: order the current stream after it), and take the result."""


def gather(part: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """All ranks' parts, of one shape, concatenated along `dim`; of one rank, what is given. Collective, as all that
    follow."""
    part = part.contiguous()
    if group.group_size == 1:
        return part
    shape = part.shape
    whole_shape = (*shape[:dim], shape[dim] * group.group_size, *shape[dim + 1 :])
    if dim == 0 or math.prod(shape[:dim]) == 1:
        whole = part.new_empty(whole_shape)
        all_gather_into_tensor(whole, part, group)
        return whole
    stacked = part.new_empty((group.group_size, *shape))
    all_gather_into_tensor(stacked, part, group)
    return stacked.movedim(0, dim).reshape(whole_shape).contiguous()


def reduce_scatter(whole: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """The sum of all ranks' tensors; of that each keeps its part of `dim`, which divides evenly."""
    if group.group_size == 1:
        return whole
    whole, part = _in_parts(whole, dim, group)
    reduce_scatter_tensor(part, whole, group=group)
    return part


def start_reduce_scatter(whole: torch.Tensor, dim: int, group: ProcessGroup) -> Finish:
    """Begin the same."""
    if group.group_size == 1:
        return lambda: whole
    whole, part = _in_parts(whole, dim, group)
    return _finish(part, reduce_scatter_tensor(part, whole, group=group, async_op=True))


@named_in_traces("tensor parallel all_reduce")
def all_reduce(values: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum of all ranks' contiguous tensors, in their own memory."""
    if group.group_size > 1:
        all_reduce_(values, group=group)
    return values


@named_in_traces("tensor parallel start all_reduce")
def start_all_reduce(values: torch.Tensor, group: ProcessGroup) -> Finish:
    """Begin the same."""
    return _finish(values, all_reduce_(values, group=group, async_op=True) if group.group_size > 1 else None)


def _in_parts(whole: torch.Tensor, dim: int, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """`whole` with the ranks' parts one behind the other, and memory for one of them."""
    shape = whole.shape
    part_shape = (*shape[:dim], shape[dim] // group.group_size, *shape[dim + 1 :])
    if dim and math.prod(shape[:dim]) != 1:
        whole = whole.view(*shape[:dim], group.group_size, *part_shape[dim:]).movedim(dim, 0)
    return whole.contiguous(), whole.new_empty(part_shape)


def _finish(result: torch.Tensor, work: Any) -> Finish:
    def finish() -> torch.Tensor:
        if work is not None:
            work.wait()
        return result

    return finish
