"""Collectives of several tensors at once: one call, one record, and one launch where the transport can.

Their names are torch's, those of its functional collectives among them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disttrain.errors import ShapeError
from disttrain.process_group._c10d import ReduceOp, Reduction, reduction_name
from disttrain.process_group._torch import outside_graphs
from disttrain.process_group.calls.checks import check_contiguous, check_is_list, check_list, check_pair
from disttrain.process_group.current import called_group
from disttrain.process_group.door import issue
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.work import Work


@outside_graphs
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
    if (group := called_group(name, group)) is None:
        return None
    try:
        _check(name, group, outputs, inputs, gathers=True)
        backend = group.backend_of(name, inputs[0])
    except Exception as error:
        group.refuse(name, error)
        raise
    return issue(group, name, backend.all_gather_into_tensors, (outputs, inputs, async_op), inputs, outputs, async_op)


@outside_graphs
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
    if (group := called_group(name, group)) is None:
        return None
    try:
        _check(name, group, outputs, inputs, gathers=False)
        backend = group.backend_of(name, inputs[0])
        arguments, how = (outputs, inputs, op, async_op), reduction_name(op)
    except Exception as error:
        group.refuse(name, error)
        raise
    return issue(group, name, backend.reduce_scatter_tensors, arguments, inputs, outputs, async_op, None, how)


@outside_graphs
def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Reduction = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """all_reduce of each tensor, in place, together.

    Args:    tensors  on one device; of any dtypes and shapes, alike on all ranks.
    Returns, raises: as all_reduce; ShapeError also without a tensor.
    Collective: every rank of the group, in the same order.
    """
    name = "all_reduce_coalesced"
    if (group := called_group(name, group)) is None:
        return None
    try:
        _check_several(name, group, tensors)
        backend = group.backend_of(name, tensors[0])
        arguments, how = (tensors, op, async_op), reduction_name(op)
    except Exception as error:
        group.refuse(name, error)
        raise
    return issue(group, name, backend.all_reduce_tensors, arguments, tensors, tensors, async_op, None, how)


@outside_graphs
def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[torch.Tensor]],
    input_tensor_list: Sequence[torch.Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gather every rank's tensors, each rank's into the list at its place.

    Args:    output_tensor_lists  for each rank, in group order, tensors like its own.
             input_tensor_list    this rank's: of any dtypes and shapes, on one device; as many on all ranks, alike.
    Returns, raises: as all_gather; ShapeError also for lists of other lengths, or empty ones.
    Collective: every rank of the group, in the same order.
    """
    name = "all_gather_coalesced"
    if (group := called_group(name, group)) is None:
        return None
    try:
        check_is_list("output_tensor_lists", output_tensor_lists)
        outputs = [tensor for tensors in output_tensor_lists for tensor in tensors]
        _check_several(name, group, input_tensor_list)
        lengths = [len(tensors) for tensors in output_tensor_lists]
        if lengths != [len(input_tensor_list)] * group.group_size:
            raise ShapeError(
                name,
                f"the lists of outputs have {lengths} tensors, for {group.group_size} ranks with "
                f"{len(input_tensor_list)} each.",
                "Give a list for each rank, with a tensor for each input.",
                rank=group.world.rank,
            )
        for index, input_ in enumerate(input_tensor_list):
            parts = [tensors[index] for tensors in output_tensor_lists]
            check_list(name, group, "output_tensor_lists", parts, input_, like_index=group.group_rank)
        backend = group.backend_of(name, input_tensor_list[0])
    except Exception as error:
        group.refuse(name, error)
        raise
    arguments = (output_tensor_lists, input_tensor_list, async_op)
    return issue(group, name, backend.all_gather_lists, arguments, input_tensor_list, outputs, async_op)


def _check_several(operation: str, group: ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
    check_is_list("the list", tensors)
    if not tensors:
        raise ShapeError(operation, "there is no tensor.", "Give at least one.", rank=group.world.rank)
    for tensor in tensors:
        check_contiguous(operation, group, "a tensor", tensor)


def _check(
    operation: str,
    group: ProcessGroup,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    gathers: bool,
) -> None:
    check_is_list("the list of outputs", outputs)
    check_is_list("the list of inputs", inputs)
    if len(outputs) != len(inputs) or not inputs:
        raise ShapeError(
            operation,
            f"there are {len(outputs)} outputs and {len(inputs)} inputs; each input needs one output.",
            "Give two lists of one length, which is not zero.",
            rank=group.world.rank,
        )
    for output, input_ in zip(outputs, inputs, strict=True):
        check_pair(operation, group, output, input_, gathers=gathers)
