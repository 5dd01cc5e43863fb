"""Experts over ranks compute what transformers' own modules compute in one process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import disttrain
from disttrain.experts import ExpertParallel, shard_experts
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks
from disttrain.tp import parallelize_module
from tests.cases.expert_layers import JUDGES, judge, ours, tokens

UNEVEN = [
    (8, 2, [5, 3]),
    (8, 2, [6]),
    (5, 2, [5, 0, 7]),
    (3, 3, [4, 1, 2, 2]),
    (2, 1, [3, 3, 0, 1]),
    (7, 7, [2, 4]),
]
"""Experts, how many each token has, and each rank's tokens."""


def check(
    name: str, num_experts: int, k: int, counts: Sequence[int], chosen: int | None = None, exchange: str = "auto"
) -> None:
    """Outputs and gradients on this rank; `chosen`: all tokens go to this expert."""
    rank = disttrain.get_rank()
    mesh = disttrain.init_device_mesh("cpu", (len(counts),), mesh_dim_names=("ep",))
    alone = judge(name, num_experts)
    layer = shard_experts(ours(alone), mesh["ep"], exchange=exchange)
    parts = [tokens(other, count, k, num_experts) for other, count in enumerate(counts)]
    if chosen is not None:
        parts = [(x, torch.full_like(indices, chosen), weights) for x, indices, weights in parts]
    x, indices, weights = (torch.cat([part[kind] for part in parts]) for kind in range(3))
    x.requires_grad_()
    weights.requires_grad_()
    expected = alone(x, indices, weights)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    expected.backward(grad)
    own_x, own_indices, own_weights = parts[rank]
    own_x.requires_grad_()
    own_weights.requires_grad_()
    out = layer(own_x, own_indices, own_weights)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    out.backward(grad[own])
    torch.testing.assert_close(out, expected[own])
    torch.testing.assert_close(own_x.grad, x.grad[own])
    torch.testing.assert_close(own_weights.grad, weights.grad[own])
    expected_grads = {key: parameter.grad for key, parameter in alone.named_parameters()}
    for key, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), expected_grads[key])


@pytest.mark.parametrize("name", list(JUDGES))
@pytest.mark.parametrize(("num_experts", "k", "counts"), UNEVEN, ids=str)
def test_values_are_those_of_one_process(name: str, num_experts: int, k: int, counts: list[int]) -> None:
    run_threads(len(counts), check, name, num_experts, k, counts)


@pytest.mark.parametrize("chosen", [0, 4])
def test_all_tokens_to_one_expert(chosen: int) -> None:
    run_threads(3, check, "mixtral", 5, 1, [4, 2, 3], chosen)


@pytest.mark.parametrize(("num_experts", "k", "counts"), UNEVEN, ids=str)
def test_values_of_exchanges_of_one_size(num_experts: int, k: int, counts: list[int]) -> None:
    run_threads(len(counts), check, "gpt_oss", num_experts, k, counts, None, "padded")
    run_threads(len(counts), check, "mixtral", num_experts, k, counts, 0, "padded")


@on_ranks(2, 3)
def test_values_over_gloo() -> None:
    size = disttrain.get_world_size()
    check("mixtral", 5, 2, [3, 0, 6][:size])
    check("gpt_oss", 2, 1, [3, 4, 1][:size])
    check("mixtral", 5, 2, [3, 0, 6][:size], None, "padded")


def test_a_plan_with_the_style() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        model = torch.nn.ModuleDict({"experts": ours(judge("mixtral", 4))})
        parallelize_module(model, mesh["ep"], {"experts": ExpertParallel()})
        assert model["experts"].gate_up_proj.to_local().shape[0] == 2

    run_threads(2, body)
