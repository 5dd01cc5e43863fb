"""The collectives of one tensor per pair of ranks: lists, and tensors that are cut into parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.compiler import is_dynamo_compiling

from disttrain.errors import ShapeError
from disttrain.process_group._c10d import ReduceOp, Reduction, reduction_name
from disttrain.process_group._torch import keep_dynamo_out, outside_graphs
from disttrain.process_group.calls.checks import check_alike, check_is_list, check_list, root_rank, row_counts
from disttrain.process_group.current import called_group
from disttrain.process_group.door import issue, parts_of
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.work import Work


def all_gather(
    tensor_list: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gather every rank's `tensor`, in group order, into `tensor_list` on all ranks.

    Args:    tensor_list  one tensor per rank, of the size that this rank contributes; sizes may differ among ranks.
             tensor       this rank's contribution; all contiguous, same dtype and device.
    Returns, raises: as all_reduce; ShapeError also when number, sizes, dtypes or devices don't fit.
    Collective: every rank of the group, in the same order, with the same sizes in `tensor_list`.
    """
    if (group := called_group("all_gather", group)) is None:
        return None
    if is_dynamo_compiling():
        # Loaded by whoever compiles: operators of graphs are made of what is here.
        from disttrain.process_group.functional import in_place

        return in_place.all_gather(tensor_list, tensor, group, async_op)
    try:
        check_list("all_gather", group, "tensor_list", tensor_list, tensor, like_index=group.group_rank)
        run = group.backend_of("all_gather", tensor).all_gather
    except Exception as error:
        group.refuse("all_gather", error)
        raise
    return issue(group, "all_gather", run, (tensor_list, tensor, async_op), (tensor,), tensor_list, async_op)


@outside_graphs
def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gather every rank's `tensor`, in group order, into `gather_list` at the destination.

    Args:    tensor       contiguous; same size and dtype on all ranks.
             gather_list  at the destination, one tensor of that size per rank; elsewhere None.
             dst          the global rank that gets them (default 0); or group_dst, its rank in the group.
    Returns, raises: as all_gather.
    Collective: every rank of the group, in the same order.
    """
    if (group := called_group("gather", group)) is None:
        return None
    try:
        dst_rank = root_rank("gather", group, dst, group_dst, "dst")
        outputs = _list_at_root("gather", group, "gather_list", gather_list, tensor, dst_rank)
        run = group.backend_of("gather", tensor).gather
    except Exception as error:
        group.refuse("gather", error)
        raise
    return issue(group, "gather", run, (tensor, outputs, dst_rank, async_op), (tensor,), outputs, async_op, dst_rank)


@outside_graphs
def scatter(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Give each rank its tensor of the source's `scatter_list`.

    Args:    tensor        receives; contiguous, same size and dtype on all ranks.
             scatter_list  at the source, one tensor of that size per rank, in group order; elsewhere None.
             src           the global rank that has them (default 0); or group_src, its rank in the group.
    Returns, raises: as all_gather.
    Collective: every rank of the group, in the same order.
    """
    if (group := called_group("scatter", group)) is None:
        return None
    try:
        src_rank = root_rank("scatter", group, src, group_src, "src")
        inputs = _list_at_root("scatter", group, "scatter_list", scatter_list, tensor, src_rank)
        run = group.backend_of("scatter", tensor).scatter
    except Exception as error:
        group.refuse("scatter", error)
        raise
    return issue(group, "scatter", run, (tensor, inputs, src_rank, async_op), inputs, (tensor,), async_op, src_rank)


@outside_graphs
def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: Reduction = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce each tensor of `input_list` over the group, and leave the one at this rank's place in `output`.

    Args:    output      of the size of this rank's part; contiguous.
             input_list  one tensor per rank, in group order; same sizes on all ranks, which may differ in the list.
    Returns, raises: as all_gather.
    Collective: every rank of the group, in the same order.
    """
    if (group := called_group("reduce_scatter", group)) is None:
        return None
    try:
        check_list("reduce_scatter", group, "input_list", input_list, output, like_index=group.group_rank)
        run = group.backend_of("reduce_scatter", output).reduce_scatter
        arguments, how = (output, input_list, op, async_op), reduction_name(op)
    except Exception as error:
        group.refuse("reduce_scatter", error)
        raise
    return issue(group, "reduce_scatter", run, arguments, input_list, (output,), async_op, None, how)


@outside_graphs
def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send each rank its tensor of `input_tensor_list`, and receive one from each into `output_tensor_list`.

    Args:    both have one tensor per rank, in group order, contiguous, same dtype and device; sizes may differ, where
             what one rank sends has the size of what the other expects.
    Returns, raises: as all_gather.
    Collective: every rank of the group, in the same order.
    """
    if (group := called_group("all_to_all", group)) is None:
        return None
    try:
        check_is_list("output_tensor_list", output_tensor_list)
        if not output_tensor_list:
            check_list("all_to_all", group, "output_tensor_list", output_tensor_list, torch.empty(0))
        like = output_tensor_list[0]
        check_list("all_to_all", group, "output_tensor_list", output_tensor_list, like)
        check_list("all_to_all", group, "input_tensor_list", input_tensor_list, like)
        run = group.backend_of("all_to_all", like).all_to_all
        arguments = (output_tensor_list, input_tensor_list, async_op)
    except Exception as error:
        group.refuse("all_to_all", error)
        raise
    return issue(group, "all_to_all", run, arguments, input_tensor_list, output_tensor_list, async_op)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Cut `input` along dim 0, send each rank its part, and put what comes from each in group order into `output`.

    Args:    output, input       contiguous, same dtype and device, same sizes but for dim 0.
             output_split_sizes  rows that come from each rank; input_split_sizes  rows that go to each rank.
                                 None: equal parts.
    Returns, raises: as all_reduce; ShapeError also when sizes, dtypes or devices don't fit.
    Collective: every rank of the group, in the same order.
    """
    if (group := called_group("all_to_all_single", group)) is None:
        return None
    if is_dynamo_compiling():
        # Loaded by whoever compiles: operators of graphs are made of what is here.
        from disttrain.process_group.functional import in_place

        return in_place.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op)
    try:
        check_alike("all_to_all_single", group, output, input)
        shape, input_shape, size = output.shape, input.shape, group.group_size
        if shape == input_shape and shape and not shape[0] % size and not output_split_sizes and not input_split_sizes:
            output_rows = input_rows = [shape[0] // size] * size
        else:
            output_rows = row_counts("all_to_all_single", group, "output", shape, output_split_sizes)
            input_rows = row_counts("all_to_all_single", group, "input", input_shape, input_split_sizes)
            _check_rows(group, shape, output_rows, input_shape, input_rows)
        run = group.backend_of("all_to_all_single", input).all_to_all_single
        arguments = (output, input, output_rows, input_rows, async_op)
    except Exception as error:
        group.refuse("all_to_all_single", error)
        raise
    how = None if output_rows is input_rows else parts_of(output_rows, input_rows)
    return issue(group, "all_to_all_single", run, arguments, (input,), (output,), async_op, None, how)


def _check_rows(
    group: ProcessGroup, shape: torch.Size, rows: Sequence[int], input_shape: torch.Size, input_rows: Sequence[int]
) -> None:
    """Raise ShapeError unless what this rank sends to itself in all_to_all_single is what it expects."""
    rank = group.group_rank
    if shape[1:] != input_shape[1:] or rows[rank] != input_rows[rank]:
        raise ShapeError(
            "all_to_all_single",
            f"output of shape {tuple(shape)} takes {rows[rank]} rows from this rank, input of shape "
            f"{tuple(input_shape)} gives {input_rows[rank]}; rows must be alike in number and size.",
            "Give split sizes and shapes that fit.",
            rank=group.world.rank,
        )


def _list_at_root(
    operation: str,
    group: ProcessGroup,
    name: str,
    tensors: Sequence[torch.Tensor] | None,
    like: torch.Tensor,
    root: int,
) -> Sequence[torch.Tensor]:
    """The root's list, checked; nothing elsewhere."""
    if tensors is not None:
        check_is_list(name, tensors)
    if group.group_rank == root:
        check_list(operation, group, name, tensors or (), like, has_one_size=True)
        assert tensors is not None
        return tensors
    if tensors:
        raise ShapeError(
            operation,
            f"{name} is given on group rank {group.group_rank}, but the root is {root}.",
            f"Give {name} at the root alone.",
            rank=group.world.rank,
        )
    check_alike(operation, group, like, like)
    return ()


# Beside a graph they run as they are.
keep_dynamo_out(all_gather, all_to_all_single)
