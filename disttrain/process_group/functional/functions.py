"""Collectives as functions: nothing is changed in place, results come when they are first used, gradients are right.

Names and arguments are those of torch's functional collectives. In eager mode a result is an AsyncCollectiveTensor,
in a graph (`torch.compile(fullgraph=True)`, make_fx) it is the value of the operators in `ops.py`.

A gradient is that of the sum of all ranks' losses, which is what one process that holds all ranks' tensors computes.
Backward passes are collectives too: every rank of the group takes them, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from disttrain.errors import GroupError, ShapeError
from disttrain.process_group._c10d import Reduction, TorchProcessGroup
from disttrain.process_group.current import current_world, resolve_group
from disttrain.process_group.functional import autograd
from disttrain.process_group.functional.autograd import GroupInfo
from disttrain.process_group.functional.ops import REDUCE_OPS
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.world import NonGroupMember


class Mesh(Protocol):
    """A mesh with a process group per axis, such as a DeviceMesh."""

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup: ...


Group = ProcessGroup | NonGroupMember | Mesh | tuple[Mesh, int | str] | str | None
"""A group, its name, a mesh of one axis, or a mesh and one of its axes; None is the default group."""


def all_reduce(self: torch.Tensor, reduceOp: str | Reduction, group: Group = None, tag: str = "") -> torch.Tensor:
    """`self`, of any shape, reduced over the group; the same on all ranks.

    Args:    reduceOp  "sum", "avg", "product", "min", "max", "band", "bor", "bxor", or a ReduceOp;  tag  is ignored.
    Raises:  ShapeError for a reduction or dtype that cannot be, GroupError, BackendError.
    Gradient: for sum, avg, min, max (shared among equal values) and product.
    Collective: every rank of the group, in the same order, and again in backward.
    """
    info = _group_info("all_reduce", group)
    op = _op_name("all_reduce", reduceOp, info)
    return autograd.all_reduce(self, op, info)


def broadcast(self: torch.Tensor, src: int, group: Group = None, tag: str = "") -> torch.Tensor:
    """The values that group rank `src` has in `self`, on all ranks.

    Args:    self  alike in shape and dtype on all ranks;  src  a rank in the group, as in torch;  tag  is ignored.
    Gradient: at the source, the sum of all ranks' gradients; zero elsewhere.
    Collective: every rank of the group, in the same order, and again in backward.
    """
    info = _group_info("broadcast", group)
    if not 0 <= src < info.group_size:
        raise GroupError(
            "broadcast",
            f"group rank {src} is out of range for a group of size {info.group_size}.",
            f"Give 0 to {info.group_size - 1}.",
            rank=info.global_rank,
        )
    return autograd.broadcast(self, src, info)


def all_gather_tensor(self: torch.Tensor, gather_dim: int, group: Group = None, tag: str = "") -> torch.Tensor:
    """All ranks' tensors, concatenated in group order along `gather_dim`.

    Args:    self  (..., d, ...), alike in shape and dtype on all ranks;  tag  is ignored.
    Returns: (..., d * group_size, ...), contiguous. For another dim than 0 it is waited for at once.
    Gradient: each rank gets the sum of its part of all ranks' gradients.
    Collective: every rank of the group, in the same order, and again in backward.
    """
    info = _group_info("all_gather_tensor", group)
    dim = _checked_dim("all_gather_tensor", self, gather_dim, info)
    if dim == 0:
        return autograd.all_gather(self, info)
    gathered = autograd.wait(autograd.all_gather(self.movedim(dim, 0), info))
    return gathered.movedim(0, dim).contiguous()


def reduce_scatter_tensor(
    self: torch.Tensor, reduceOp: str | Reduction, scatter_dim: int, group: Group = None, tag: str = ""
) -> torch.Tensor:
    """`self` reduced over the group, and of that this rank's equal part along `scatter_dim`.

    Args:    self  (..., d * group_size, ...), alike in shape and dtype on all ranks;  reduceOp, tag  as all_reduce.
    Returns: (..., d, ...), contiguous. For another dim than 0 it is waited for at once.
    Raises:  ShapeError also when the dim does not divide evenly.
    Gradient: as all_reduce.
    Collective: every rank of the group, in the same order, and again in backward.
    """
    info = _group_info("reduce_scatter_tensor", group)
    op = _op_name("reduce_scatter_tensor", reduceOp, info)
    dim = _checked_dim("reduce_scatter_tensor", self, scatter_dim, info)
    if self.shape[dim] % info.group_size:
        raise ShapeError(
            "reduce_scatter_tensor",
            f"dim {dim} has size {self.shape[dim]}, the group {info.group_size} ranks; it must divide evenly.",
            "Pad the dim to a multiple.",
            rank=info.global_rank,
        )
    if dim == 0:
        return autograd.reduce_scatter(self, op, info)
    part = autograd.wait(autograd.reduce_scatter(self.movedim(dim, 0), op, info))
    return part.movedim(0, dim).contiguous()


def all_to_all_single(
    self: torch.Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: Group = None,
    tag: str = "",
) -> torch.Tensor:
    """Rows of dim 0 go to the ranks by `input_split_sizes`; what comes is concatenated in group order.

    Args:    self  (sum(input_split_sizes), ...);  splits  one number of rows per rank, None for equal parts, and what
             one rank sends to another is what that one expects;  tag  is ignored.
    Returns: (sum(output_split_sizes), ...)
    Raises:  ShapeError when the splits don't fit the tensor or the group.
    Gradient: goes back the way the rows came.
    Collective: every rank of the group, in the same order, and again in backward.
    """
    info = _group_info("all_to_all_single", group)
    _checked_dim("all_to_all_single", self, 0, info)
    sent = _splits(self.shape[0], input_split_sizes, info)
    received = _splits(self.shape[0], output_split_sizes, info)
    if len(sent) != info.group_size or len(received) != info.group_size or sum(sent) != self.shape[0]:
        raise ShapeError(
            "all_to_all_single",
            f"input_split_sizes {list(sent)} and output_split_sizes {list(received)} are given for a tensor of "
            f"{self.shape[0]} rows and {info.group_size} ranks.",
            "Give one number per rank; the input's add up to its rows.",
            rank=info.global_rank,
        )
    return autograd.all_to_all(self, received, sent, info)


def permute_tensor(self: torch.Tensor, src_dst: Sequence[int], group: Group = None, tag: str = "") -> torch.Tensor:
    """The tensor that this rank receives when group rank r sends its own to group rank `src_dst[r]`.

    Args:    self  alike in shape and dtype on all ranks;  src_dst  a permutation, the same on all ranks.
    Raises:  ShapeError when src_dst is not a permutation of the group's ranks.
    Gradient, collective: as all_to_all_single.
    """
    info = _group_info("permute_tensor", group)
    if sorted(src_dst) != list(range(info.group_size)):
        raise ShapeError(
            "permute_tensor",
            f"src_dst={list(src_dst)} is not a permutation of the ranks 0 to {info.group_size - 1}.",
            "Name each group rank once.",
            rank=info.global_rank,
        )
    numel = self.numel()
    received = [numel if target == info.group_rank else 0 for target in src_dst]
    sent = [numel if rank == src_dst[info.group_rank] else 0 for rank in range(info.group_size)]
    return all_to_all_single(self.reshape(-1), received, sent, group).view(self.shape)


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a plain tensor whose values are there; what is no AsyncCollectiveTensor is returned as it is."""
    return autograd.wait(tensor)


_GROUPS = (ProcessGroup, NonGroupMember, TorchProcessGroup, str)


def _group_info(operation: str, group: Group) -> GroupInfo:
    if isinstance(group, tuple):
        group = group_of(*group)
    elif group is not None and not isinstance(group, _GROUPS):
        group = group_of(group)
    elif isinstance(group, str):
        group = current_world(operation).find_group(operation, group)
    group = resolve_group(operation, group)
    return GroupInfo(group.group_name, group.group_size, group.group_rank, group.world.rank)


def group_of(mesh: Mesh, axis: int | str | None = None) -> ProcessGroup:
    """`mesh.get_group(axis)`, also where Dynamo reads: of torch 2.11, it knows no method that gives a group."""
    return mesh.get_group(axis)


# Dynamo calls it, and takes the group for a constant, as the mesh is. torch.compiler.assume_constant_result would load
# Dynamo.
group_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _op_name(operation: str, op: str | Reduction, info: GroupInfo) -> str:
    if isinstance(op, str):
        name = op.lower()
        if name in REDUCE_OPS:
            return name
    else:
        for name, reduction in REDUCE_OPS.items():
            if op == reduction:
                return name
    raise ShapeError(
        operation, f"there is no reduction {op!r}.", f"Known are {', '.join(REDUCE_OPS)}.", rank=info.global_rank
    )


def _checked_dim(operation: str, tensor: torch.Tensor, dim: int, info: GroupInfo) -> int:
    """`dim` counted from the front."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise ShapeError(
            operation,
            f"a tensor of shape {tuple(tensor.shape)} has no dim {dim}.",
            "Reshape it first; a single value to (1,).",
            rank=info.global_rank,
        )
    return dim % tensor.dim()


def _splits(num_rows: int, splits: Sequence[int] | None, info: GroupInfo) -> list[int]:
    if splits is not None:
        return list(splits)
    if num_rows % info.group_size:
        raise ShapeError(
            "all_to_all_single",
            f"{num_rows} rows don't divide evenly among {info.group_size} ranks.",
            "Give output_split_sizes and input_split_sizes.",
            rank=info.global_rank,
        )
    return [num_rows // info.group_size] * info.group_size
