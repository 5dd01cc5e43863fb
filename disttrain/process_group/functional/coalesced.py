"""Functional collectives of several tensors at once, as torch has them: one call for each, which run side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disttrain.errors import ShapeError
from disttrain.process_group._c10d import Reduction
from disttrain.process_group.functional.functions import Group, all_gather_tensor, all_reduce, reduce_scatter_tensor


def all_reduce_coalesced(
    self: Sequence[torch.Tensor], reduceOp: str | Reduction, group: Group = None, tag: str = ""
) -> list[torch.Tensor]:
    """`all_reduce` of each tensor. Collective: every rank of the group, with as many."""
    return [all_reduce(tensor, reduceOp, group, tag) for tensor in self]


def all_gather_into_tensor_coalesced(
    self: Sequence[torch.Tensor], group: Group = None, tag: str = ""
) -> list[torch.Tensor]:
    """`all_gather_tensor` of each tensor, along dim 0. Collective: every rank of the group, with as many."""
    return [all_gather_tensor(tensor, 0, group, tag) for tensor in self]


def reduce_scatter_tensor_coalesced(
    inputs: Sequence[torch.Tensor],
    reduceOp: str | Reduction,
    scatter_dim: Sequence[int],
    group: Group = None,
    tag: str = "",
) -> list[torch.Tensor]:
    """`reduce_scatter_tensor` of each tensor, along its own dim. Collective: every rank of the group, with as many."""
    if len(scatter_dim) != len(inputs):
        problem = f"scatter_dim has {len(scatter_dim)} dims for {len(inputs)} tensors."
        raise ShapeError("reduce_scatter_tensor_coalesced", problem, "Give one for each.")
    pairs = zip(inputs, scatter_dim, strict=True)
    return [reduce_scatter_tensor(tensor, reduceOp, dim, group, tag) for tensor, dim in pairs]
