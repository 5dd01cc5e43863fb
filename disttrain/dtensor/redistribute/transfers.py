"""The collectives that move parts: done at once, or, while a compiler records, as operators of its graph.

Both ways have the same values. At once, buffers are reused where a graph would make copies. Parts on the meta device
have no values to move: they are replaced by parts of the resulting shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from disttrain.dtensor._torch import is_traced
from disttrain.process_group import (
    ProcessGroup,
    ReduceOp,
    all_gather_into_tensor,
    all_to_all,
    functional,
    reduce_scatter_tensor,
)
from disttrain.process_group import all_reduce as all_reduce_
from disttrain.process_group import broadcast as broadcast_

_REDUCE_OPS = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVG,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
}


def all_reduce(values: torch.Tensor, reduce_op: str, group: ProcessGroup) -> torch.Tensor:
    """The reduction of contiguous `values`, whose memory it may take. Collective, as all that follow."""
    if _is_recorded(values):
        return functional.all_reduce(values, reduce_op, group)
    if values.is_meta:
        return values
    all_reduce_(values, _REDUCE_OPS[reduce_op], group=group)
    return values


def all_gather(part: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """All ranks' contiguous parts of one shape, concatenated along dim 0."""
    if _is_recorded(part):
        return functional.all_gather_tensor(part, 0, group)
    gathered = part.new_empty((group.group_size * part.shape[0], *part.shape[1:]))
    if part.is_meta:
        return gathered
    all_gather_into_tensor(gathered, part, group=group)
    return gathered


def reduce_scatter(values: torch.Tensor, reduce_op: str, group: ProcessGroup) -> torch.Tensor:
    """The reduction of contiguous `values`, and of that this rank's equal part of dim 0."""
    if _is_recorded(values):
        return functional.reduce_scatter_tensor(values, reduce_op, 0, group)
    part = values.new_empty((values.shape[0] // group.group_size, *values.shape[1:]))
    if values.is_meta:
        return part
    reduce_scatter_tensor(part, values, _REDUCE_OPS[reduce_op], group=group)
    return part


def exchange(sent: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], group: ProcessGroup) -> list[torch.Tensor]:
    """Contiguous `sent[r]` goes to group rank r, and what comes from group rank r has `shapes[r]`."""
    if _is_recorded(sent[0]):
        received_sizes = [math.prod(shape) for shape in shapes]
        flat = torch.cat([piece.reshape(-1) for piece in sent])
        arrived = functional.all_to_all_single(flat, received_sizes, [piece.numel() for piece in sent], group)
        return [piece.view(list(shape)) for piece, shape in zip(arrived.split(received_sizes), shapes, strict=True)]
    received = [sent[0].new_empty(list(shape)) for shape in shapes]
    if sent[0].is_meta:
        return received
    all_to_all(received, list(sent), group=group)
    return received


def broadcast(values: torch.Tensor, group_src: int, group: ProcessGroup) -> torch.Tensor:
    """The values of group rank `group_src`, sent to all. `values` are contiguous, and may be overwritten."""
    if _is_recorded(values):
        return functional.broadcast(values, group_src, group)
    if values.is_meta:
        return values
    broadcast_(values, group=group, group_src=group_src)
    return values


def _is_recorded(tensor: torch.Tensor) -> bool:
    """Also true for a tensor of the compiler that is inspected while tracing: it has no memory to send."""
    return is_traced() or type(tensor) is not torch.Tensor
