"""The functional collectives along dim 0, with their gradients. Group and operation are known to be good here.

Each runs at once in eager mode, and as operators while a graph is recorded. A gradient is that of the sum of all
ranks' losses: what one process that held all ranks' tensors would compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from disttrain.process_group._c10d import is_traced
from disttrain.process_group.calls.async_tensor import AsyncCollectiveTensor
from disttrain.process_group.functional import ops
from disttrain.process_group.functional.order import start

_PLAIN = (torch.Tensor, torch.nn.Parameter, AsyncCollectiveTensor)


class GroupInfo(NamedTuple):
    """A group's name and size, which a graph can hold, and this process's ranks."""

    group_name: str
    group_size: int
    group_rank: int
    global_rank: int


def all_reduce(input: torch.Tensor, op: str, info: GroupInfo) -> torch.Tensor:
    return _applied(_AllReduce, input, op, info) if _needs_gradient(input) else _all_reduce(input, op, info)


def broadcast(input: torch.Tensor, src: int, info: GroupInfo) -> torch.Tensor:
    return _applied(_Broadcast, input, src, info) if _needs_gradient(input) else _broadcast(input, src, info)


def all_gather(input: torch.Tensor, info: GroupInfo) -> torch.Tensor:
    return _applied(_AllGather, input, info) if _needs_gradient(input) else _all_gather(input, info)


def reduce_scatter(input: torch.Tensor, op: str, info: GroupInfo) -> torch.Tensor:
    return _applied(_ReduceScatter, input, op, info) if _needs_gradient(input) else _reduce_scatter(input, op, info)


def all_to_all(input: torch.Tensor, received: Sequence[int], sent: Sequence[int], info: GroupInfo) -> torch.Tensor:
    """`received` and `sent` are rows of dim 0, one number per rank."""
    if _needs_gradient(input):
        return _applied(_AllToAll, input, received, sent, info)
    return _all_to_all(input, received, sent, info)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, op: str, info: GroupInfo) -> torch.Tensor:
        output = _all_reduce(input, op, info)
        ctx.op, ctx.info = op, info
        if op not in _LINEAR:
            ctx.save_for_backward(input, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.op in _LINEAR:
            return wait(all_reduce(grad, ctx.op, ctx.info)), None, None
        total = all_reduce(grad, "sum", ctx.info)
        values, output = ctx.saved_tensors
        return _through_reduction(values, output, total, ctx.op, ctx.info), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, op: str, info: GroupInfo) -> torch.Tensor:
        output = _reduce_scatter(input, op, info)
        ctx.op, ctx.info = op, info
        if op not in _LINEAR:
            ctx.save_for_backward(input, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        total = all_gather(grad, ctx.info)
        if ctx.op == "sum":
            return wait(total), None, None
        if ctx.op == "avg":
            return total / ctx.info.group_size, None, None
        values, part = ctx.saved_tensors
        return _through_reduction(values, all_gather(part, ctx.info), total, ctx.op, ctx.info), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, info: GroupInfo) -> torch.Tensor:
        ctx.info = info
        return _all_gather(input, info)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return wait(reduce_scatter(grad, "sum", ctx.info)), None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, src: int, info: GroupInfo) -> torch.Tensor:
        ctx.src, ctx.info = src, info
        return _broadcast(input, src, info)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        total = wait(all_reduce(grad, "sum", ctx.info))
        # Graphs must be alike on all ranks: a compiler that sees no use of the result would leave the collective out.
        is_source = torch.full((), ctx.info.group_rank == ctx.src, dtype=torch.bool, device=total.device)
        return torch.where(is_source, total, torch.zeros_like(total)), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, received: Sequence[int], sent: Sequence[int], info: GroupInfo
    ) -> torch.Tensor:
        ctx.received, ctx.sent, ctx.info = received, sent, info
        return _all_to_all(input, received, sent, info)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return wait(all_to_all(grad, ctx.sent, ctx.received, ctx.info)), None, None, None


_LINEAR = ("sum", "avg")


def _through_reduction(
    input: torch.Tensor, output: torch.Tensor, total: torch.Tensor, op: str, info: GroupInfo
) -> torch.Tensor:
    """The gradient of a reduction that is not linear; `total` is the sum of all ranks' gradients of `output`."""
    if op == "product":
        # Dividing the product by the input would fail at zeros: multiply what the others hold instead.
        factors = all_gather(input.unsqueeze(0), info)
        is_own = torch.arange(info.group_size, device=input.device) == info.group_rank
        others = torch.where(is_own.view(-1, *[1] * input.dim()), torch.ones_like(input), factors).prod(0)
        return total * others.conj()
    is_chosen = (input == output).to(total.dtype)
    return total * is_chosen / all_reduce(is_chosen, "sum", info)


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a plain tensor whose values are there, with its gradient.

    What backward gives to the engine must be plain: it adds gradients up where no dispatch sees it.
    """
    if not isinstance(tensor, AsyncCollectiveTensor):
        return tensor
    if tensor.requires_grad or is_traced():
        return tensor.view_as(tensor)  # an operator: it waits, and autograd sees it
    return tensor.wait()


def _needs_gradient(input: torch.Tensor) -> bool:
    return input.requires_grad and torch.is_grad_enabled()


def _applied(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)
    return result


def _is_recorded(input: torch.Tensor) -> bool:
    return is_traced() or type(input) not in _PLAIN


def _finish(input: torch.Tensor, handle: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    result: torch.Tensor = torch.ops.disttrain.wait_tensor(handle, input, size)
    return result


def _all_reduce(input: torch.Tensor, op: str, info: GroupInfo) -> torch.Tensor:
    if _is_recorded(input):
        return _finish(input, start(torch.ops.disttrain.all_reduce, input, op, info.group_name), input.shape)
    return AsyncCollectiveTensor(*ops.start_all_reduce(input, op, info.group_name))


def _broadcast(input: torch.Tensor, src: int, info: GroupInfo) -> torch.Tensor:
    if _is_recorded(input):
        return _finish(input, start(torch.ops.disttrain.broadcast, input, src, info.group_name), input.shape)
    return AsyncCollectiveTensor(*ops.start_broadcast(input, src, info.group_name))


def _all_gather(input: torch.Tensor, info: GroupInfo) -> torch.Tensor:
    if _is_recorded(input):
        size = (input.shape[0] * info.group_size, *input.shape[1:])
        return _finish(input, start(torch.ops.disttrain.all_gather_into_tensor, input, info.group_name), size)
    return AsyncCollectiveTensor(*ops.start_all_gather(input, info.group_name))


def _reduce_scatter(input: torch.Tensor, op: str, info: GroupInfo) -> torch.Tensor:
    if _is_recorded(input):
        size = (input.shape[0] // info.group_size, *input.shape[1:])
        return _finish(input, start(torch.ops.disttrain.reduce_scatter_tensor, input, op, info.group_name), size)
    return AsyncCollectiveTensor(*ops.start_reduce_scatter(input, op, info.group_name))


def _all_to_all(input: torch.Tensor, received: Sequence[int], sent: Sequence[int], info: GroupInfo) -> torch.Tensor:
    if _is_recorded(input):
        size = (sum(received), *input.shape[1:])
        return _finish(
            input, start(torch.ops.disttrain.all_to_all_single, input, received, sent, info.group_name), size
        )
    return AsyncCollectiveTensor(*ops.start_all_to_all(input, received, sent, info.group_name))
