"""Functional collectives in compiled graphs: what compilers like to move, share, overwrite and leave out."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import pytest
import torch

import disttrain
from disttrain.errors import DisttrainError
from disttrain.process_group import Call, World, entered_world
from disttrain.process_group import functional as F
from disttrain.store import HashStore
from disttrain.testing.pytest_plugin import on_ranks

Outputs = tuple[torch.Tensor, ...]


def overwritten(tensor: torch.Tensor) -> Outputs:
    """The input changes, and then the result, in place."""
    total = F.all_reduce(tensor, "sum")
    gathered = F.all_gather_tensor(tensor, 0)
    tensor.add_(1)
    total = F.wait_tensor(total)
    total.mul_(3)
    return total, gathered * 1, tensor * 1


def aliased(tensor: torch.Tensor) -> Outputs:
    """Outputs share memory with each other and with a result; two collectives share their input."""
    doubled = tensor * 2
    first, second = F.all_reduce(doubled, "sum"), F.all_reduce(doubled, "max")
    first = F.wait_tensor(first)
    return first, first.view(-1), first[1:], F.wait_tensor(second), doubled


def chained(tensor: torch.Tensor) -> Outputs:
    """One's result is the other's input, and still in use afterwards."""
    gathered = F.all_gather_tensor(tensor.sin(), 0)
    part = F.reduce_scatter_tensor(gathered, "sum", 0)
    return part + 1, gathered.cos(), F.all_reduce(part, "avg") - part


@pytest.mark.sweep(0)
@on_ranks(2, timeout_s=360)
def test_values_are_those_of_the_program_as_written() -> None:
    rank = disttrain.get_rank()
    for function in (overwritten, aliased, chained):
        torch._dynamo.reset()
        # Outside of graphs the input belongs to the collective until the result is waited for.
        recorded = torch.compile(function, backend="eager", fullgraph=True, dynamic=True)
        compiled = torch.compile(function, fullgraph=True, dynamic=True)
        for num_rows in (4, 6):
            given = torch.arange(3.0 * num_rows).view(num_rows, 3) + rank
            expected, found = ([F.wait_tensor(each) for each in run(given.clone())] for run in (recorded, compiled))
            torch.testing.assert_close(found, expected)
    disttrain.barrier()
    assert not disttrain.current_world()._pending


class Recorder:
    """Keeps the names of what is called."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def enqueued(self, call: Call) -> None:
        self.names.append(call.operation)

    def completed(self, call: Call, error: DisttrainError | None) -> None:
        assert error is None


def calls(function: Callable[[torch.Tensor], torch.Tensor], rank: int) -> list[str]:
    """What a rank calls, in order, and lets nothing lie about."""
    torch._dynamo.reset()
    recorder = Recorder()
    world = World(HashStore(), rank, 2, backend="fake", timeout_s=1.0, device=torch.device("cpu"))
    with entered_world(world):
        world.add_observer(recorder)
        # This pass of Inductor's forgets the order of effects; graphs that differ among ranks must do without it.
        options = {"reorder_for_peak_memory": False}
        torch.compile(function, fullgraph=True, options=options)(torch.ones(4, 4))
        assert not world._pending
    return recorder.names


def small(tensor: torch.Tensor) -> torch.Tensor:
    """Few numbers of many. A product of matrices: for that nothing is generated and compiled."""
    return tensor.reshape(2, -1) @ tensor.reshape(-1, 2)


@on_ranks(1, timeout_s=360)
def test_ranks_with_different_graphs_call_the_same_in_the_same_order() -> None:
    def of_rank(rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def step(tensor: torch.Tensor) -> torch.Tensor:
            total = F.all_reduce(tensor @ tensor if rank else tensor, "sum")
            gathered = F.all_gather_tensor(tensor, 0)
            sent = F.broadcast(tensor, 0)
            # A result that one rank has no use for, and others that are used in another order.
            few = [small(each) for each in ((gathered, total) if rank else (sent, gathered, total))]
            return reduce(torch.matmul, few)

        return step

    expected = ["all_reduce", "all_gather_into_tensor", "broadcast"]
    assert [calls(of_rank(rank), rank) for rank in range(2)] == [expected] * 2
