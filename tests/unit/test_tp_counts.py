"""What cut modules send: one collective per pair of layers, one gather and one scatter with a cut sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import CommDebugMode, DTensor, Replicate, Shard
from disttrain.testing import run_threads
from disttrain.tp import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
    vocab_parallel_cross_entropy,
)
from tests.cases.tensor_parallel import Attention, Block, GatedMLP, block_plan

REDUCE, GATHER, SCATTER = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"
NUM_RANKS = 2


def counted(function: Callable[[], Any]) -> tuple[dict[str, int], Any]:
    with CommDebugMode() as comms:
        value = function()
    return comms.get_comm_counts(), value


def counts_of(
    make: Callable[[], nn.Module], plan: Any, shape: tuple[int, ...], *, as_dtensor: bool = False
) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Of two rounds, forward and backward."""

    def on_rank() -> list[tuple[dict[str, int], dict[str, int]]]:
        mesh = disttrain.init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
        module = parallelize_module(make(), mesh, plan())
        found = []
        for _ in range(2):
            x: torch.Tensor = torch.randn(shape, requires_grad=True)
            if as_dtensor:
                x = DTensor.from_local(x.detach(), mesh, [Shard(1)]).requires_grad_()
            forward, y = counted(lambda: module(x))  # noqa: B023 -- called at once
            backward, _ = counted(lambda: y.sum().backward())  # noqa: B023
            found.append((forward, backward))
        return found

    return run_threads(NUM_RANKS, on_rank)[0]


class Pair(nn.Sequential):
    """One layer by columns, one by rows."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))


def test_a_pair_of_layers_reduces_once_each_way() -> None:
    plan = lambda: {"0": ColwiseParallel(), "2": RowwiseParallel()}  # noqa: E731
    assert counts_of(Pair, plan, (2, 4, 6)) == [({REDUCE: 1}, {REDUCE: 1})] * 2


def test_a_pair_of_layers_on_a_cut_sequence_gathers_once_and_scatters_once_each_way() -> None:
    plan = lambda: {  # noqa: E731
        "0": ColwiseParallel(input_layouts=Shard(1)),
        "2": RowwiseParallel(output_layouts=Shard(1)),
    }
    assert counts_of(Pair, plan, (2, 4, 6)) == [({GATHER: 1, SCATTER: 1}, {GATHER: 1, SCATTER: 1})] * 2


@pytest.mark.parametrize("as_dtensor", [False, True])
@pytest.mark.parametrize(
    ("make", "columns", "last", "num_shared"),
    [
        (lambda: GatedMLP(6, 8), ("gate", "up"), "down", 0),
        (lambda: Attention(8, 4, 2), ("query", "key", "value"), "out", 0),
        (lambda: Attention(8, 4, 1), ("query", "key", "value"), "out", 2),
    ],
)
def test_layers_that_share_an_input_gather_it_once(
    make: Callable[[], nn.Module], columns: tuple[str, ...], last: str, num_shared: int, as_dtensor: bool
) -> None:
    head_dim = 2 if len(columns) == 3 else None

    def plan() -> dict[str, Any]:
        return {
            "": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            **{name: ColwiseParallel(head_dim=head_dim) for name in columns},
            last: RowwiseParallel(output_layouts=Shard(1)),
        }

    width = 8 if head_dim else 6
    found = counts_of(make, plan, (2, 4, width), as_dtensor=as_dtensor)
    assert all(forward == {GATHER: 1, SCATTER: 1} for forward, _ in found)
    # Of heads that ranks share, each has terms of the gradients.
    shared = [{REDUCE: 1}, {REDUCE: num_shared}] if num_shared else [{}, {}]
    assert [backward for _, backward in found] == [{GATHER: 1, SCATTER: 1, **reduced} for reduced in shared]


@pytest.mark.parametrize("style", [SequenceParallel, lambda: SequenceParallel(use_local_output=True)])
@pytest.mark.parametrize(
    ("make", "num_parameters"), [(lambda: nn.LayerNorm(6), 2), (lambda: nn.RMSNorm(6), 1), (lambda: nn.Dropout(0.5), 0)]
)
def test_gradients_of_norms_are_reduced_once(
    make: Callable[[], nn.Module], num_parameters: int, style: Callable[[], Any]
) -> None:
    # Together, but where they are added to what an earlier backward has left.
    expected = [{REDUCE: 1}, {REDUCE: num_parameters}] if num_parameters else [{}, {}]
    assert [forward for forward, _ in counts_of(make, style, (2, 4, 6))] == [{}, {}]
    assert [backward for _, backward in counts_of(make, style, (2, 4, 6))] == expected


def test_a_block_on_a_cut_sequence() -> None:
    """Two pairs; two norms of three parameters between them."""
    block = lambda: Block(8, 4, 2)  # noqa: E731
    found = counts_of(block, lambda: block_plan(2, sequence=True), (2, 4, 8))
    assert found == [({GATHER: 2, SCATTER: 2}, {GATHER: 2, SCATTER: 2, REDUCE: num_reduced}) for num_reduced in (1, 3)]
    found = counts_of(block, lambda: block_plan(2, sequence=False), (2, 4, 8))
    # Each layer by columns, called for itself, reduces the gradient of its input.
    assert found == [({REDUCE: 2}, {REDUCE: 5})] * 2


def test_a_loss_of_cut_logits_gathers_two_numbers_per_token() -> None:
    def on_rank() -> tuple[Any, Any]:
        mesh = disttrain.init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        head = parallelize_module(nn.Linear(6, 8, bias=False), mesh, ColwiseParallel(use_local_output=False))
        x = torch.randn(5, 6, requires_grad=True)
        logits = head(x)
        forward, loss = counted(lambda: vocab_parallel_cross_entropy(logits, torch.arange(5)))
        backward, _ = counted(loss.backward)
        return forward, backward

    assert run_threads(NUM_RANKS, on_rank)[0] == ({GATHER: 1}, {REDUCE: 1})
