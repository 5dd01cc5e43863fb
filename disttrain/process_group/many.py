"""Collectives of several tensors at once: one call, one record, and one launch where the transport can.

Their names are those of torch's functional collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disttrain.errors import ShapeError
from disttrain.process_group._c10d import ReduceOp, Reduction
from disttrain.process_group.checks import check_pair
from disttrain.process_group.current import resolve_group
from disttrain.process_group.door import issue
from disttrain.process_group.group import ProcessGroup
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
