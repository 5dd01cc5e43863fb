"""Parts of tensors between the ranks of an axis, at once and without gradients: each starts, and is awaited later."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from disttrain.process_group import all_gather_into_tensor, reduce_scatter_tensor
from disttrain.process_group import all_reduce as all_reduce_
from disttrain.tp.axis import Axis

Finish = Callable[[], torch.Tensor]
"""Wait for what was started (CUDA: order the current stream after it), and take the result."""


def start_gather(part: torch.Tensor, dim: int, axis: Axis) -> Finish:
    """Begin to concatenate all ranks' parts, of one shape, along `dim`. Collective, as all that follow."""
    part = part.contiguous()
    shape = part.shape
    in_place = math.prod(shape[:dim]) == 1
    whole_shape = (*shape[:dim], shape[dim] * axis.size, *shape[dim + 1 :])
    gathered = part.new_empty(whole_shape if in_place else (axis.size, *shape))
    work = all_gather_into_tensor(gathered.view(-1), part.view(-1), axis.group, async_op=True)

    def finish() -> torch.Tensor:
        if work is not None:
            work.wait()
        return gathered if in_place else gathered.movedim(0, dim).reshape(whole_shape)

    return finish


def start_reduce_scatter(whole: torch.Tensor, dim: int, axis: Axis) -> Finish:
    """Begin to sum all ranks' tensors; of that each keeps its part of `dim`, which divides evenly."""
    shape = whole.shape
    part_shape = (*shape[:dim], shape[dim] // axis.size, *shape[dim + 1 :])
    if math.prod(shape[:dim]) != 1:
        whole = whole.view(*shape[:dim], axis.size, *part_shape[dim:]).movedim(dim, 0)
    whole = whole.contiguous()
    part = whole.new_empty(part_shape)
    work = reduce_scatter_tensor(part.view(-1), whole.view(-1), group=axis.group, async_op=True)
    return _finish(part, work)


def start_all_reduce(values: torch.Tensor, axis: Axis) -> Finish:
    """Begin to sum all ranks' contiguous tensors, in their own memory."""
    return _finish(values, all_reduce_(values, group=axis.group, async_op=True))


def _finish(result: torch.Tensor, work: object) -> Finish:
    def finish() -> torch.Tensor:
        if work is not None:
            work.wait()  # type: ignore[attr-defined]
        return result

    return finish
