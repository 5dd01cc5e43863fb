"""Where tensor parallel does other than torch's, on purpose: one test for each line of the page of differences that no
other test is named for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import CommDebugMode, DTensor, Replicate, Shard
from disttrain.errors import LayoutError, MeshError, ShardingError
from disttrain.testing import run_threads
from disttrain.tp import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from tests.cases.tensor_parallel import Block, Decoder, GatedMLP, block_plan, same_as_alone


def on_two_ranks(function: Callable[[disttrain.DeviceMesh], Any]) -> list[Any]:
    return run_threads(2, lambda: function(disttrain.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))))


def test_a_key_that_matches_nothing_is_an_error() -> None:
    def on_rank(mesh: disttrain.DeviceMesh) -> None:
        module = GatedMLP()
        with pytest.raises(ShardingError, match=r"'gates' .* matches no module .* 'gate'"):
            parallelize_module(module, mesh, {"up": ColwiseParallel(), "gates": ColwiseParallel()})
        assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())

    on_two_ranks(on_rank)


def test_there_is_no_current_mesh() -> None:
    with pytest.raises(MeshError, match="the mesh is None"):
        parallelize_module(nn.Linear(4, 4), None, ColwiseParallel())


def test_a_tied_matrix_stays_tied() -> None:
    def on_rank(mesh: disttrain.DeviceMesh) -> None:
        model = Decoder(tied=True)
        plan = {"embedding": RowwiseParallel(), "head": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh, plan)
        assert model.head.weight is model.embedding.weight
        with pytest.raises(ShardingError, match="shared with a module"):
            parallelize_module(Decoder(tied=True), mesh, {"head": ColwiseParallel()})

    on_two_ranks(on_rank)


class Scaled(nn.Module):
    """Takes more than one input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.layer(x) * scale


@pytest.mark.parametrize(
    "call",
    [lambda m, x: m(x), lambda m, x: m(x=x), lambda m, x: m(x, 2.0), lambda m, x: m(x, scale=2.0)],
    ids=["alone", "by name", "with another", "with another by name"],
)
def test_one_placement_is_that_of_the_first_input_however_it_comes(call: Callable[..., torch.Tensor]) -> None:
    alone = Scaled()

    def on_rank(mesh: disttrain.DeviceMesh) -> None:
        module = copy.deepcopy(alone)
        plan = {
            "": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
            "layer": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(module, mesh, plan)
        x = torch.arange(8.0).view(2, 4)
        torch.testing.assert_close(call(module, x[mesh.get_local_rank()][None]), call(alone, x))

    on_two_ranks(on_rank)


def test_gradients_of_norms_are_whole_when_they_have_come() -> None:
    def on_rank(mesh: disttrain.DeviceMesh) -> None:
        block = parallelize_module(Block(), mesh, block_plan(2, sequence=True))
        with CommDebugMode() as comms:
            block(torch.randn(1, 4, 8)).sum().backward()
        grad = block.attention_norm.weight.grad
        assert isinstance(grad, DTensor)
        assert grad.placements == (Replicate(),)
        once = comms.get_comm_counts()["all_reduce"]
        with CommDebugMode() as comms:
            nn.utils.clip_grad_norm_([block.attention_norm.weight, block.mlp_norm.weight, block.mlp_norm.bias], 1.0)
        # They are not summed up again by whoever reads them.
        assert (once, comms.get_comm_counts()) == (1, {})

    on_two_ranks(on_rank)


def test_plain_parts_of_uneven_sizes_are_refused() -> None:
    def on_rank(mesh: disttrain.DeviceMesh) -> torch.Size:
        plans = [
            {"0": ColwiseParallel(), "1": RowwiseParallel(output_layouts=Shard(1), use_local_output=use_local)}
            for use_local in (True, False)
        ]
        made = [parallelize_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh, plan) for plan in plans]
        x = torch.randn(1, 7, 4)
        with pytest.raises(LayoutError, match="plain parts don't say what they are parts of"):
            made[0](x)
        return made[1](x).shape

    assert on_two_ranks(on_rank) == [(1, 7, 4)] * 2


def test_a_derivative_of_the_gradient_is_refused() -> None:
    def on_rank(mesh: disttrain.DeviceMesh) -> None:
        module = parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())
        x = torch.randn(2, 4, requires_grad=True)
        with pytest.raises(LayoutError, match="create_graph"):
            torch.autograd.grad(module(x).sum(), x, create_graph=True)

    on_two_ranks(on_rank)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_a_fused_layer_or_gpt2s_computes(num_ranks: int) -> None:
    from transformers.pytorch_utils import Conv1D

    class Attention(nn.Module):
        """Query, key and value of heads of two, in one layer."""

        def __init__(self) -> None:
            super().__init__()
            self.all, self.out = Conv1D(3 * 8, 8), Conv1D(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in self.all(x).chunk(3, dim=-1))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).flatten(2))

    plan = lambda: {"all": ColwiseParallel(num_blocks=3, head_dim=2), "out": RowwiseParallel()}  # noqa: E731
    same_as_alone(Attention, plan, torch.randn(2, 3, 8), num_ranks)
