"""Collectives that write into their arguments, in a graph: the operators of `ops.py`, then a copy.

What Dynamo reads of `calls/collectives.py` and `calls/list_collectives.py` comes here. Gradients are as without a
compiler, where autograd does not see what is written: what was there before gets that of what is there now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from disttrain.process_group._c10d import Reduction
from disttrain.process_group._torch import run_outside
from disttrain.process_group.calls import collectives, list_collectives
from disttrain.process_group.calls.checks import check_alike, check_pair, root_rank
from disttrain.process_group.functional import functions
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.work import Work


class _Overwritten(torch.autograd.Function):
    """The value, with the gradient of the tensor that it is written over."""

    @staticmethod
    def forward(_ctx: Any, _tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled() and not tensor.is_leaf:
        tensor.copy_(_Overwritten.apply(tensor, value))  # type: ignore[no-untyped-call]
    else:
        with torch.no_grad():
            tensor.detach().copy_(value)


def all_reduce(tensor: torch.Tensor, op: Reduction, group: ProcessGroup, async_op: bool) -> Work | None:
    if async_op:
        return run_outside(collectives.all_reduce, tensor, op, group, async_op)
    _write(tensor, functions.all_reduce(tensor.detach(), op, group))
    return None


def broadcast(
    tensor: torch.Tensor, src: int | None, group: ProcessGroup, async_op: bool, group_src: int | None
) -> Work | None:
    if async_op:
        return run_outside(collectives.broadcast, tensor, src, group, async_op, group_src)
    root = root_rank("broadcast", group, src, group_src, "src")
    _write(tensor, functions.broadcast(tensor.detach(), root, group))
    return None


def all_gather_into_tensor(
    output: torch.Tensor, input: torch.Tensor, group: ProcessGroup, async_op: bool
) -> Work | None:
    if async_op:
        return run_outside(collectives.all_gather_into_tensor, output, input, group, async_op)
    check_pair("all_gather_into_tensor", group, output, input, gathers=True)
    with torch.no_grad():
        gathered = functions.all_gather_tensor(input.detach().reshape(-1), 0, group)
        output.detach().copy_(gathered.view(output.shape))
    return None


def all_gather(
    outputs: Sequence[torch.Tensor], input: torch.Tensor, group: ProcessGroup, async_op: bool
) -> Work | None:
    # Which sizes are alike each rank knows of its own list.
    is_even = len(outputs) == group.group_size and all(output.numel() == input.numel() for output in outputs)
    if async_op or not is_even:
        return run_outside(list_collectives.all_gather, outputs, input, group, async_op)
    with torch.no_grad():
        gathered = functions.all_gather_tensor(input.detach().reshape(-1), 0, group).view(len(outputs), -1)
        for output, part in zip(outputs, gathered.unbind(), strict=True):
            check_alike("all_gather", group, output, input)
            output.detach().copy_(part.view(output.shape))
    return None


def reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: Reduction, group: ProcessGroup, async_op: bool
) -> Work | None:
    if async_op:
        return run_outside(collectives.reduce_scatter_tensor, output, input, op, group, async_op)
    check_pair("reduce_scatter_tensor", group, output, input, gathers=False)
    with torch.no_grad():
        part = functions.reduce_scatter_tensor(input.detach().reshape(-1), op, 0, group)
        output.detach().copy_(part.view(output.shape))
    return None


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    group: ProcessGroup,
    async_op: bool,
) -> Work | None:
    if async_op:
        return run_outside(
            list_collectives.all_to_all_single, output, input, output_splits, input_splits, group, async_op
        )
    check_alike("all_to_all_single", group, output, input)
    if output_splits is None and output.shape != input.shape:
        output_splits = [output.shape[0] // group.group_size] * group.group_size
    with torch.no_grad():
        received = functions.all_to_all_single(input.detach(), output_splits, input_splits, group)
        output.detach().copy_(received.view(output.shape))
    return None
