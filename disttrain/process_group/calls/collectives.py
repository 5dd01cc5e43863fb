"""The collectives of one tensor per rank, under torch.distributed's names.

Each checks its arguments and goes through the one door.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.compiler import is_dynamo_compiling

from disttrain.process_group._c10d import ReduceOp, Reduction, reduction_name
from disttrain.process_group._torch import keep_dynamo_out, outside_graphs
from disttrain.process_group.calls.checks import check_contiguous, check_pair, peer_rank
from disttrain.process_group.current import called_group
from disttrain.process_group.door import issue
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.work import Work
from disttrain.store.durations import Duration, seconds


def all_reduce(
    tensor: torch.Tensor, op: Reduction = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Reduce `tensor` over the group, in place, so that all ranks hold the result.

    Args:    tensor  any shape, contiguous; same shape and dtype on all ranks. On Gloo also a sparse one, of which each
                     rank has its own elements, to be summed.
    Returns: Work when async_op, else None once the current stream is ordered after it.
    Raises:  ShapeError for a tensor that is not contiguous, BackendError when no backend serves its device.
    Collective: every rank of the group, in the same order.
    """
    if (group := called_group("all_reduce", group)) is None:
        return None
    if is_dynamo_compiling():
        # Loaded by whoever compiles: operators of graphs are made of what is here.
        from disttrain.process_group.functional import in_place

        return in_place.all_reduce(tensor, op, group, async_op)
    try:
        if not tensor.is_contiguous() and not group.backend_of("all_reduce", tensor).reduces_sparse(tensor, op):
            check_contiguous("all_reduce", group, "tensor", tensor)
        backend = group.backend_of("all_reduce", tensor)
        how = reduction_name(op)
    except Exception as error:
        group.refuse("all_reduce", error)
        raise
    both = (tensor,)
    return issue(group, "all_reduce", backend.all_reduce, (tensor, op, async_op), both, both, async_op, None, how)


@outside_graphs
def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Reduction = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduce `tensor` over the group, in place at the destination; the other ranks keep their values.

    Args:    tensor  any shape, contiguous; same shape and dtype on all ranks.
             dst     the global rank that gets the result; or group_dst, its rank in the group.
    Returns, raises: as all_reduce; GroupError when the destination is not a member.
    Collective: every rank of the group, in the same order.
    """
    if (group := called_group("reduce", group)) is None:
        return None
    try:
        dst_rank = peer_rank("reduce", group, dst, group_dst, "dst")
        check_contiguous("reduce", group, "tensor", tensor)
        run = group.backend_of("reduce", tensor).reduce
        outputs = (tensor,) if group.group_rank == dst_rank else ()
        arguments, how = (tensor, dst_rank, op, async_op), reduction_name(op)
    except Exception as error:
        group.refuse("reduce", error)
        raise
    return issue(group, "reduce", run, arguments, (tensor,), outputs, async_op, dst_rank, how)


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
    if (group := called_group("broadcast", group)) is None:
        return None
    if is_dynamo_compiling():
        # Loaded by whoever compiles: operators of graphs are made of what is here.
        from disttrain.process_group.functional import in_place

        return in_place.broadcast(tensor, src, group, async_op, group_src)
    try:
        root_rank = peer_rank("broadcast", group, src, group_src, "src")
        if not tensor.is_contiguous():
            check_contiguous("broadcast", group, "tensor", tensor)
        backend = group.backend_of("broadcast", tensor)
        arguments, both = (tensor, root_rank, async_op), (tensor,)
    except Exception as error:
        group.refuse("broadcast", error)
        raise
    return issue(group, "broadcast", backend.broadcast, arguments, both, both, async_op, root_rank)


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
    if (group := called_group("all_gather_into_tensor", group)) is None:
        return None
    if is_dynamo_compiling():
        # Loaded by whoever compiles: operators of graphs are made of what is here.
        from disttrain.process_group.functional import in_place

        return in_place.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
    try:
        check_pair("all_gather_into_tensor", group, output_tensor, input_tensor, gathers=True)
        backend = group.backend_of("all_gather_into_tensor", input_tensor)
        arguments = (output_tensor, input_tensor, async_op)
        run = backend.all_gather_into_tensor
    except Exception as error:
        group.refuse("all_gather_into_tensor", error)
        raise
    return issue(group, "all_gather_into_tensor", run, arguments, (input_tensor,), (output_tensor,), async_op)


all_gather_single = all_gather_into_tensor
"""Its name in later versions of torch; `reduce_scatter_single` likewise."""


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
    if (group := called_group("reduce_scatter_tensor", group)) is None:
        return None
    if is_dynamo_compiling():
        # Loaded by whoever compiles: operators of graphs are made of what is here.
        from disttrain.process_group.functional import in_place

        return in_place.reduce_scatter_tensor(output, input, op, group, async_op)
    try:
        check_pair("reduce_scatter_tensor", group, output, input, gathers=False)
        backend = group.backend_of("reduce_scatter_tensor", input)
        arguments = (output, input, op, async_op)
        run = backend.reduce_scatter_tensor
        how = reduction_name(op)
    except Exception as error:
        group.refuse("reduce_scatter_tensor", error)
        raise
    return issue(group, "reduce_scatter_tensor", run, arguments, (input,), (output,), async_op, None, how)


reduce_scatter_single = reduce_scatter_tensor


@outside_graphs
def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: Duration | None = None,
) -> Work | None:
    """Return once every rank of the group is here.

    With NCCL it runs on `device_ids[0]` (default: the rank's own GPU) and waits for the kernels queued there before it.
    `timeout` holds for this one, in place of the group's; with async_op give it to the handle's `wait`.
    Collective: every rank of the group, in the same order.
    """
    if (group := called_group("barrier", group)) is None:
        return None
    try:
        limit_s = None if timeout is None else seconds("barrier", timeout)
        on_gpu = bool(device_ids) and group.barrier_device.type == "cuda"
        device = torch.device("cuda", device_ids[0]) if device_ids and on_gpu else group.barrier_device
        run = group.backend("barrier", device.type).barrier
    except Exception as error:
        group.refuse("barrier", error)
        raise
    if limit_s is None or async_op:
        return issue(group, "barrier", run, (device,), (), (), async_op)
    work = issue(group, "barrier", run, (device,), (), (), True)
    assert work is not None  # it is asynchronous
    work.wait(limit_s)
    return None


# Their names in earlier versions of torch.
_all_gather_base = all_gather_into_tensor
_reduce_scatter_base = reduce_scatter_tensor

# Outside of graphs they run as they are.
keep_dynamo_out(all_reduce, broadcast, all_gather_into_tensor, reduce_scatter_tensor)
