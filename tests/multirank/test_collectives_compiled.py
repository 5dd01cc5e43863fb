"""Collectives that write in place within compiled functions: in the graph, or refused where there must be one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import disttrain
from disttrain import ReduceOp
from disttrain.testing.pytest_plugin import on_ranks

Program = Callable[[torch.Tensor], torch.Tensor]


def summed(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    disttrain.all_reduce(x)
    return x + 1


def reduced(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    disttrain.all_reduce(x)
    disttrain.all_reduce(x, ReduceOp.MAX, disttrain.group.WORLD)
    return x + 1


def reduced_where_it_came(x: torch.Tensor) -> torch.Tensor:
    disttrain.all_reduce(x, ReduceOp.AVG)
    return x + 1


def sent_to_all(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    disttrain.broadcast(x, 1)
    return x + 1


def gathered(x: torch.Tensor) -> torch.Tensor:
    size = disttrain.get_world_size()
    joined, stacked = torch.empty(size * 6, 2), torch.empty(size, 6, 2)
    parts = [torch.empty(6, 2) for _ in range(size)]
    disttrain.all_gather_into_tensor(joined, x)
    disttrain.all_gather_into_tensor(stacked, x.cos())
    disttrain.all_gather(parts, x + 1)
    return joined + stacked.view(-1, 2) + torch.cat(parts)


def cut(x: torch.Tensor) -> torch.Tensor:
    part, exchanged = torch.empty(6 // disttrain.get_world_size(), 2), torch.empty(6, 2)
    disttrain.reduce_scatter_tensor(part, x * 3)
    disttrain.all_to_all_single(exchanged, x)
    return torch.cat([part, exchanged]) + 1


def with_a_handle(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    work = disttrain.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    return x + 1


def to_one(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    disttrain.reduce(x, 0)
    disttrain.barrier()
    return x + 1


def messages(x: torch.Tensor) -> torch.Tensor:
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    received = torch.empty(6, 2)
    for work in (disttrain.isend(x, (rank + 1) % size), disttrain.irecv(received, (rank - 1) % size)):
        work.wait()
    return received + 1


def _given() -> torch.Tensor:
    return torch.arange(12.0).view(6, 2) + disttrain.get_rank()


@on_ranks(2, timeout_s=360)
def test_a_graph_holds_what_returns_nothing() -> None:
    for program in (reduced, reduced_where_it_came, sent_to_all, gathered, cut):
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
        given, expected = _given(), _given()
        torch.testing.assert_close(compiled(given), program(expected))
        torch.testing.assert_close(given, expected)  # written to, or not, in both ways


@on_ranks(2, timeout_s=360)
def test_gradients_pass_as_without_a_compiler() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(summed, backend="aot_eager", fullgraph=True)
    gradients = []
    for program in (summed, compiled):
        x = _given().requires_grad_()
        program(x).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


@on_ranks(2, timeout_s=360)
def test_others_break_the_graph_or_say_why() -> None:
    for program in (with_a_handle, to_one, messages):
        torch._dynamo.reset()
        expected = program(_given())
        torch.testing.assert_close(torch.compile(program, backend="aot_eager")(_given()), expected)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="Call others outside of the compiled function"):
            torch.compile(program, backend="aot_eager", fullgraph=True)(_given())
