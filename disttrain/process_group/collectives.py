"""The collectives, under torch.distributed's names. Each checks its arguments and goes through the one door."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disttrain.errors import GroupError, ShapeError
from disttrain.process_group._c10d import ReduceOp, Reduction
from disttrain.process_group.current import resolve_group
from disttrain.process_group.door import issue
from disttrain.process_group.group import ProcessGroup, barrier_device
from disttrain.process_group.work import Work


def all_reduce(
    tensor: torch.Tensor, op: Reduction = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Reduce `tensor` over the group, in place, so that all ranks hold the result.

    Args:    tensor  any shape, contiguous; same shape and dtype on all ranks.
    Returns: Work when async_op, else None once the current stream is ordered after it.
    Raises:  ShapeError for a tensor that is not contiguous, BackendError when no backend serves its device.
    Collective: every rank of the group, in the same order.
    """
    group = resolve_group("all_reduce", group)
    _check_contiguous("all_reduce", group, tensor=tensor)
    backend = group.backend("all_reduce", tensor.device.type)
    return issue(group, "all_reduce", backend.all_reduce, (tensor, op, async_op), (tensor,), (tensor,), async_op)


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy the source's `tensor` to all ranks of the group.

    Args:    tensor  any shape, contiguous; same shape and dtype on all ranks.
             src     the global rank that has the values; or group_src, its rank in the group.
    Returns, raises: as all_reduce; GroupError when the source is not a member.
    Collective: every rank of the group, in the same order.
    """
    group = resolve_group("broadcast", group)
    root_rank = peer_rank("broadcast", group, src, group_src, "src")
    _check_contiguous("broadcast", group, tensor=tensor)
    backend = group.backend("broadcast", tensor.device.type)
    arguments = (tensor, root_rank, async_op)
    return issue(group, "broadcast", backend.broadcast, arguments, (tensor,), (tensor,), async_op, root_rank)


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gather every rank's input, in group order, into one tensor on all ranks.

    Args:    output_tensor  group_size times the elements of `input_tensor`, concatenated along dim 0 or stacked;
             input_tensor   same shape and dtype on all ranks; both contiguous, same dtype and device.
    Returns, raises: as all_reduce; ShapeError also when sizes, dtypes or devices don't fit.
    Collective: every rank of the group, in the same order.
    """
    group = resolve_group("all_gather_into_tensor", group)
    _check_pair("all_gather_into_tensor", group, output_tensor, input_tensor, gathers=True)
    backend = group.backend("all_gather_into_tensor", input_tensor.device.type)
    arguments = (output_tensor, input_tensor, async_op)
    run = backend.all_gather_into_tensor
    return issue(group, "all_gather_into_tensor", run, arguments, (input_tensor,), (output_tensor,), async_op)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Reduction = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce `input` over the group and leave this rank's equal part in `output`.

    Args:    output  (d0 / group_size, ...), contiguous;  input  (d0, ...), same dtype and device, contiguous.
    Returns, raises: as all_reduce; ShapeError also when sizes, dtypes or devices don't fit.
    Collective: every rank of the group, in the same order.
    """
    group = resolve_group("reduce_scatter_tensor", group)
    _check_pair("reduce_scatter_tensor", group, output, input, gathers=False)
    backend = group.backend("reduce_scatter_tensor", input.device.type)
    arguments = (output, input, op, async_op)
    run = backend.reduce_scatter_tensor
    return issue(group, "reduce_scatter_tensor", run, arguments, (input,), (output,), async_op)


def barrier(
    group: ProcessGroup | None = None, async_op: bool = False, device_ids: Sequence[int] | None = None
) -> Work | None:
    """Return once every rank of the group is here.

    With NCCL it runs on `device_ids[0]` (default: the rank's own GPU) and waits for the kernels queued there before it.
    Collective: every rank of the group, in the same order.
    """
    group = resolve_group("barrier", group)
    device = torch.device("cuda", device_ids[0]) if device_ids else barrier_device(group)
    return issue(group, "barrier", group.backend("barrier", device.type).barrier, (device,), (), (), async_op)


def peer_rank(operation: str, group: ProcessGroup, rank: int | None, group_rank: int | None, name: str) -> int:
    """The peer's rank in the group, from its global rank or its rank in the group: exactly one is given."""
    if (rank is None) == (group_rank is None):
        raise GroupError(
            operation,
            f"{name}={rank} and group_{name}={group_rank} are given.",
            "Give exactly one of the two.",
            rank=group.world.rank,
        )
    if rank is not None:
        return group.group_rank_of(operation, rank)
    assert group_rank is not None
    return group.checked_group_rank(operation, group_rank)


def _check_contiguous(operation: str, group: ProcessGroup, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ShapeError(
                operation,
                f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}; it must be contiguous.",
                "Pass its .contiguous() copy, and copy the result back if you need it in place.",
                rank=group.world.rank,
            )


def _check_pair(
    operation: str, group: ProcessGroup, output: torch.Tensor, input: torch.Tensor, *, gathers: bool
) -> None:
    whole, part = (output, input) if gathers else (input, output)
    if whole.numel() != part.numel() * group.group_size:
        raise ShapeError(
            operation,
            f"output has shape {tuple(output.shape)}, input {tuple(input.shape)}, the group {group.group_size} ranks; "
            f"{'output' if gathers else 'input'} must have {group.group_size} times the other's elements.",
            f"Allocate {part.numel() * group.group_size} elements for it, not {whole.numel()}; pad uneven parts.",
            rank=group.world.rank,
        )
    if output.dtype != input.dtype or output.device != input.device:
        raise ShapeError(
            operation,
            f"output is {output.dtype} on {output.device}, input {input.dtype} on {input.device}; they must be alike.",
            "Convert one of them first.",
            rank=group.world.rank,
        )
    _check_contiguous(operation, group, output=output, input=input)
