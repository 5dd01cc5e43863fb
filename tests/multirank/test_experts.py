"""Experts over ranks compute what transformers' own modules compute in one process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import disttrain
from disttrain.dtensor import DTensor
from disttrain.errors import BackendError
from disttrain.experts import ExpertParallel, shard_experts
from disttrain.experts.exchange.peers import Peers
from disttrain.mesh import DeviceMesh
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks
from disttrain.tp import parallelize_module
from tests.cases.expert_layers import JUDGES, judge, ours, tokens
from tests.cases.row_memory import Host

UNEVEN = [
    (8, 2, [5, 3]),
    (8, 2, [6]),
    (5, 2, [5, 0, 7]),
    (3, 3, [4, 1, 2, 2]),
    (2, 1, [3, 3, 0, 1]),
    (7, 7, [2, 4]),
]
"""Experts, how many each token has, and each rank's tokens."""


def ep_mesh() -> DeviceMesh:
    return disttrain.init_device_mesh("cpu", (disttrain.get_world_size(),), mesh_dim_names=("ep",))["ep"]


def check(
    name: str,
    num_experts: int,
    k: int,
    counts: Sequence[int],
    chosen: int | None = None,
    exchange: str = "auto",
    host: Host | None = None,
) -> None:
    """Outputs and gradients on this rank; `chosen`: all tokens go to this expert."""
    rank = disttrain.get_rank()
    mesh = ep_mesh()
    alone = judge(name, num_experts)
    layer = shard_experts(ours(alone), mesh, exchange=exchange)
    if host is not None and len(counts) > 1:
        layer.exchange = Peers(mesh.get_group(), make_memory=host.make)
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


@pytest.mark.parametrize(("num_experts", "k", "counts"), UNEVEN, ids=str)
def test_values_of_rows_that_are_written_to_others_memory(num_experts: int, k: int, counts: list[int]) -> None:
    run_threads(len(counts), check, "gpt_oss", num_experts, k, counts, None, "auto", Host(len(counts)))
    run_threads(len(counts), check, "mixtral", num_experts, k, counts, 0, "auto", Host(len(counts)))


@on_ranks(2)
def test_memory_that_ranks_cannot_reach_is_refused_on_all() -> None:
    layer = shard_experts(ours(judge("mixtral", 4)), ep_mesh(), exchange="peers")
    with pytest.raises(BackendError, match="cannot write to each other's memory"):
        layer(*tokens(disttrain.get_rank(), 3, 2, 4))


@on_ranks(2, 3)
def test_values_over_gloo() -> None:
    size = disttrain.get_world_size()
    check("mixtral", 5, 2, [3, 0, 6][:size])
    check("gpt_oss", 2, 1, [3, 4, 1][:size])
    check("mixtral", 5, 2, [3, 0, 6][:size], None, "padded")


def test_a_plan_with_the_style() -> None:
    def body() -> None:
        mesh = ep_mesh()
        model = torch.nn.ModuleDict({"experts": ours(judge("mixtral", 4))})
        parallelize_module(model, mesh, {"experts": ExpertParallel()})
        assert model["experts"].gate_up_proj.to_local().shape[0] == 2

    run_threads(2, body)


def check_some(exchange: str, host: Host, counts: Sequence[int]) -> None:
    """Gradients of the tokens, of the weights and of the experts, one after the other, of one graph."""
    rank, mesh = disttrain.get_rank(), ep_mesh()
    alone = judge("gpt_oss", 5)
    layer = shard_experts(ours(alone), mesh, exchange="padded" if exchange == "padded" else "auto")
    if exchange == "peers":
        layer.exchange = Peers(mesh.get_group(), make_memory=host.make)
    parts = [tokens(other, count, 2, 5) for other, count in enumerate(counts)]
    x, indices, weights = (torch.cat([part[kind] for part in parts]) for kind in range(3))
    given, own_indices, own_weights = parts[rank]
    parameters = dict(layer.named_parameters())
    whole = [x.requires_grad_(), weights.requires_grad_(), *map(dict(alone.named_parameters()).get, parameters)]
    expected = alone(x, indices, weights)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    leaves = [given.requires_grad_(), own_weights.requires_grad_(), *parameters.values()]
    out = layer(given, own_indices, own_weights)
    grads = torch.autograd.grad(expected, whole, grad)
    wished = [grads[0][own], grads[1][own], *grads[2:]]
    for some in ([0], [1], [*range(2, len(leaves))], [0, 1], [0, 2], [*range(len(leaves))]):
        got = torch.autograd.grad(out, [leaves[one] for one in some], grad[own], retain_graph=True)
        for one, value in zip(some, got, strict=True):
            torch.testing.assert_close(value.full_tensor() if one > 1 else value, wished[one])
    # As the halves of a pipeline's backward.
    for some in (leaves[:1], leaves[1:]):
        out.backward(grad[own], inputs=some, retain_graph=True)
    for leaf, value in zip(leaves, wished, strict=True):
        torch.testing.assert_close(leaf.grad.full_tensor() if isinstance(leaf.grad, DTensor) else leaf.grad, value)


@pytest.mark.parametrize("exchange", ["all_to_all", "padded", "peers"])
def test_gradients_of_some(exchange: str) -> None:
    run_threads(4, check_some, exchange, Host(4), [2, 1, 3, 0])
