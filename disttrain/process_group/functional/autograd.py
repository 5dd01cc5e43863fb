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


class Place(NamedTuple):
    """A group as a graph can hold it, and this process in it."""

    group_name: str
    group_size: int
    group_rank: int
    global_rank: int


def all_reduce(input: torch.Tensor, op: str, place: Place) -> torch.Tensor:
    return _applied(_AllReduce, input, op, place) if _needs_gradient(input) else _all_reduce(input, op, place)


def broadcast(input: torch.Tensor, src: int, place: Place) -> torch.Tensor:
    return _applied(_Broadcast, input, src, place) if _needs_gradient(input) else _broadcast(input, src, place)


def all_gather(input: torch.Tensor, place: Place) -> torch.Tensor:
    return _applied(_AllGather, input, place) if _needs_gradient(input) else _all_gather(input, place)


def reduce_scatter(input: torch.Tensor, op: str, place: Place) -> torch.Tensor:
    return _applied(_ReduceScatter, input, op, place) if _needs_gradient(input) else _reduce_scatter(input, op, place)


def all_to_all(input: torch.Tensor, received: Sequence[int], sent: Sequence[int], place: Place) -> torch.Tensor:
    """`received` and `sent` are rows of dim 0, one number per rank."""
    if _needs_gradient(input):
        return _applied(_AllToAll, input, received, sent, place)
    return _all_to_all(input, received, sent, place)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, op: str, place: Place) -> torch.Tensor:
        output = _all_reduce(input, op, place)
        ctx.op, ctx.place = op, place
        if op not in _LINEAR:
            ctx.save_for_backward(input, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.op in _LINEAR:
            return wait(all_reduce(grad, ctx.op, ctx.place)), None, None
        total = all_reduce(grad, "sum", ctx.place)
        values, output = ctx.saved_tensors
        return _through_reduction(values, output, total, ctx.op, ctx.place), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, op: str, place: Place) -> torch.Tensor:
        output = _reduce_scatter(input, op, place)
        ctx.op, ctx.place = op, place
        if op not in _LINEAR:
            ctx.save_for_backward(input, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        total = all_gather(grad, ctx.place)
        if ctx.op == "sum":
            return wait(total), None, None
        if ctx.op == "avg":
            return total / ctx.place.group_size, None, None
        values, part = ctx.saved_tensors
        return _through_reduction(values, all_gather(part, ctx.place), total, ctx.op, ctx.place), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, place: Place) -> torch.Tensor:
        ctx.place = place
        return _all_gather(input, place)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return wait(reduce_scatter(grad, "sum", ctx.place)), None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, src: int, place: Place) -> torch.Tensor:
        ctx.src, ctx.place = src, place
        return _broadcast(input, src, place)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        total = wait(all_reduce(grad, "sum", ctx.place))
        # Graphs must be alike on all ranks: a compiler that sees no use of the result would leave the collective out.
        is_source = torch.full((), ctx.place.group_rank == ctx.src, dtype=torch.bool, device=total.device)
        return torch.where(is_source, total, torch.zeros_like(total)), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, received: Sequence[int], sent: Sequence[int], place: Place
    ) -> torch.Tensor:
        ctx.received, ctx.sent, ctx.place = received, sent, place
        return _all_to_all(input, received, sent, place)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return wait(all_to_all(grad, ctx.sent, ctx.received, ctx.place)), None, None, None


_LINEAR = ("sum", "avg")


def _through_reduction(
    input: torch.Tensor, output: torch.Tensor, total: torch.Tensor, op: str, place: Place
) -> torch.Tensor:
    """The gradient of a reduction that is not linear; `total` is the sum of all ranks' gradients of `output`."""
    if op == "product":
        # Dividing the product by the input would fail at zeros: multiply what the others hold instead.
        factors = all_gather(input.unsqueeze(0), place)
        is_own = torch.arange(place.group_size, device=input.device) == place.group_rank
        others = torch.where(is_own.view(-1, *[1] * input.dim()), torch.ones_like(input), factors).prod(0)
        return total * others.conj()
    is_chosen = (input == output).to(total.dtype)
    return total * is_chosen / all_reduce(is_chosen, "sum", place)


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


def _all_reduce(input: torch.Tensor, op: str, place: Place) -> torch.Tensor:
    if _is_recorded(input):
        return _finish(input, start(torch.ops.disttrain.all_reduce, input, op, place.group_name), input.shape)
    return AsyncCollectiveTensor(*ops.start_all_reduce(input, op, place.group_name))


def _broadcast(input: torch.Tensor, src: int, place: Place) -> torch.Tensor:
    if _is_recorded(input):
        return _finish(input, start(torch.ops.disttrain.broadcast, input, src, place.group_name), input.shape)
    return AsyncCollectiveTensor(*ops.start_broadcast(input, src, place.group_name))


def _all_gather(input: torch.Tensor, place: Place) -> torch.Tensor:
    if _is_recorded(input):
        size = (input.shape[0] * place.group_size, *input.shape[1:])
        return _finish(input, start(torch.ops.disttrain.all_gather_into_tensor, input, place.group_name), size)
    return AsyncCollectiveTensor(*ops.start_all_gather(input, place.group_name))


def _reduce_scatter(input: torch.Tensor, op: str, place: Place) -> torch.Tensor:
    if _is_recorded(input):
        size = (input.shape[0] // place.group_size, *input.shape[1:])
        return _finish(input, start(torch.ops.disttrain.reduce_scatter_tensor, input, op, place.group_name), size)
    return AsyncCollectiveTensor(*ops.start_reduce_scatter(input, op, place.group_name))


def _all_to_all(input: torch.Tensor, received: Sequence[int], sent: Sequence[int], place: Place) -> torch.Tensor:
    if _is_recorded(input):
        size = (sum(received), *input.shape[1:])
        return _finish(
            input, start(torch.ops.disttrain.all_to_all_single, input, received, sent, place.group_name), size
        )
    return AsyncCollectiveTensor(*ops.start_all_to_all(input, received, sent, place.group_name))
