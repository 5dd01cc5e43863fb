"""Collectives of several tensors at once: one call, one record, and one launch where the transport can.

Their names are torch's, those of its functional collectives among them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disttrain.errors import ShapeError
from disttrain.process_group._c10d import ReduceOp, Reduction
from disttrain.process_group.checks import check_pair
from disttrain.process_group.coalescing import Coalesced, coalescing_manager
from disttrain.process_group.collectives import all_reduce
from disttrain.process_group.current import resolve_group
from disttrain.process_group.door import issue
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.list_collectives import all_gather
from disttrain.process_group.work import Work


def all_gather_into_tensor_coalesced(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gather every rank's inputs, each in group order into the output at its place in the list.

    Args:    outputs, inputs  as the two of all_gather_into_tensor; lists of one length, all on one device.
    Returns, raises: as all_gather_into_tensor; ShapeError also for lists of different lengths, or empty ones.
    Collective: every rank of the group, in the same order.
    """
    name = "all_gather_into_tensor_coalesced"
    group = resolve_group(name, group)
    try:
        _check(name, group, outputs, inputs, gathers=True)
        backend = group.backend_of(name, inputs[0])
    except Exception as error:
        group.refuse(name, error)
        raise
    return issue(group, name, backend.all_gather_into_tensors, (outputs, inputs, async_op), inputs, outputs, async_op)


def reduce_scatter_tensor_coalesced(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    op: Reduction = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce each input over the group and leave this rank's equal part in the output at its place in the list.

    Args:    outputs, inputs  as the two of reduce_scatter_tensor; lists of one length, all on one device.
    Returns, raises: as reduce_scatter_tensor; ShapeError also for lists of different lengths, or empty ones.
    Collective: every rank of the group, in the same order.
    """
    name = "reduce_scatter_tensor_coalesced"
    group = resolve_group(name, group)
    try:
        _check(name, group, outputs, inputs, gathers=False)
        backend = group.backend_of(name, inputs[0])
    except Exception as error:
        group.refuse(name, error)
        raise
    arguments = (outputs, inputs, op, async_op)
    return issue(group, name, backend.reduce_scatter_tensors, arguments, inputs, outputs, async_op)


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Reduction = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Coalesced | None:
    """all_reduce of each tensor, in place, together.

    Args:    tensors  on one device; of any dtypes and shapes, alike on all ranks.
    Returns: what has a `wait` when async_op, else None.
    Raises:  as all_reduce; ShapeError without a tensor.
    Collective: every rank of the group, in the same order.
    """
    with _together("all_reduce_coalesced", tensors, group, async_ops=async_op) as together:
        for tensor in tensors:
            all_reduce(tensor, op, group, async_op=True)
    return together if async_op else None


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[torch.Tensor]],
    input_tensor_list: Sequence[torch.Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Coalesced | None:
    """all_gather of each input into the list at its place, together.

    Args:    output_tensor_lists  for each input a tensor of each rank, in group order.
    Returns, raises: as all_reduce_coalesced, and as all_gather; ShapeError also for lists of different lengths.
    Collective: every rank of the group, in the same order.
    """
    name = "all_gather_coalesced"
    if len(output_tensor_lists) != len(input_tensor_list):
        error = ShapeError(
            name,
            f"there are {len(output_tensor_lists)} lists of outputs and {len(input_tensor_list)} inputs.",
            "Give a list for each input.",
        )
        resolve_group(name, group).refuse(name, error)
        raise error
    with _together(name, input_tensor_list, group, async_ops=async_op) as together:
        for outputs, input_ in zip(output_tensor_lists, input_tensor_list, strict=True):
            all_gather(list(outputs), input_, group, async_op=True)
    return together if async_op else None


def _together(
    operation: str, tensors: Sequence[torch.Tensor], group: ProcessGroup | None, *, async_ops: bool
) -> Coalesced:
    if not tensors:
        error = ShapeError(operation, "there is no tensor.", "Give at least one.")
        resolve_group(operation, group).refuse(operation, error)
        raise error
    return coalescing_manager(group, tensors[0].device, async_ops=async_ops)


def _check(
    operation: str,
    group: ProcessGroup,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    gathers: bool,
) -> None:
    if len(outputs) != len(inputs) or not inputs:
        raise ShapeError(
            operation,
            f"there are {len(outputs)} outputs and {len(inputs)} inputs; each input needs one output.",
            "Give two lists of one length, which is not zero.",
            rank=group.world.rank,
        )
    for output, input_ in zip(outputs, inputs, strict=True):
        check_pair(operation, group, output, input_, gathers=gathers)
