"""What comes out of cut layers may be written to; what their backward needs may not, and is watched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import DTensor, Replicate, Shard
from disttrain.errors import ShardingError
from disttrain.testing import run_threads
from disttrain.tp import ColwiseParallel, DivideAttributes, PrepareModuleInput, RowwiseParallel, parallelize_module
from tests.cases.tensor_parallel import gathered, same_as_alone, scattered


class InPlace(nn.Module):
    """Writes to the results of both layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.up(x).relu_())
        return y.add_(1)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_results_may_be_written_to(num_ranks: int, overlap: bool) -> None:
    plan = lambda: {  # noqa: E731
        "up": ColwiseParallel(input_layouts=Shard(1), overlap=overlap),
        "down": RowwiseParallel(output_layouts=Shard(1), overlap=overlap),
    }
    for shape in ((1, 4, 6), (2, 4, 6)):
        same_as_alone(InPlace, plan, torch.randn(shape), num_ranks, enter=scattered(1), leave=gathered(1))


class Spoiling(nn.Module):
    """Writes to the input after the layer has used it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        x.mul_(0)
        return y


@pytest.mark.parametrize("shared_by", [None, []])
def test_inputs_are_watched(shared_by: list[str] | None) -> None:
    def on_rank() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        prepare = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), shared_by=shared_by)
        module = parallelize_module(Spoiling(), mesh, {"": prepare, "up": ColwiseParallel()})
        y = module(torch.randn(2, 2, 6))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    run_threads(2, on_rank)


def test_columns_given_on_are_watched() -> None:
    def on_rank() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        up = parallelize_module(nn.Linear(4, 8), mesh, ColwiseParallel(use_local_output=False))
        down = parallelize_module(nn.Linear(8, 4), mesh, RowwiseParallel())
        h = up(torch.randn(3, 4))
        assert isinstance(h, DTensor)
        y = down(h)
        h.mul_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    run_threads(2, on_rank)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.odd = 4, 3


def test_numbers_are_divided_once() -> None:
    def on_rank() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        module = parallelize_module(Counting(), mesh, DivideAttributes("num_heads"))
        assert module.num_heads == 2
        with pytest.raises(ShardingError, match="a rank's share already: 2"):
            parallelize_module(module, mesh, DivideAttributes("num_heads"))
        with pytest.raises(ShardingError, match="odd of Counting is 3, among 2 ranks"):
            parallelize_module(module, mesh, DivideAttributes("odd"))

    run_threads(2, on_rank)
