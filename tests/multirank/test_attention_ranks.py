"""Attention of DTensors cut by heads and sequences, and a choice that all ranks make alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import CommDebugMode, DTensor, Placement, Replicate, Shard, distribute_tensor
from disttrain.errors import LayoutError, ShapeError
from disttrain.kernels import Alibi, Causal, Documents, Prefix, SoftCap, attention, attention_choices
from disttrain.kernels.attention import choice as attention_choice
from disttrain.testing.pytest_plugin import on_ranks
from disttrain.tp import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.cases.attention import rule_called, tensors, wished
from tests.cases.kernels import drawn
from tests.cases.shardings import mesh_of

BATCH, LENGTH = 3, 20


def assert_as_a_whole(
    attend: Any, mesh: disttrain.DeviceMesh, heads: tuple[int, int], rule: Any, placements: list[list[Placement]]
) -> DTensor:
    """Values and gradients of query, key and value that lie so; the result."""
    whole = tensors(BATCH, heads, LENGTH, 8)
    exact = [one.clone().requires_grad_() for one in whole]
    own = [distribute_tensor(one, mesh, lie).requires_grad_() for one, lie in zip(whole, placements, strict=True)]
    found, expected = attend(*own, rule), wished(rule)(*exact)
    assert isinstance(found, DTensor)
    torch.testing.assert_close(found.full_tensor(), expected)
    weight = drawn(*expected.shape, seed=5)
    (found * distribute_tensor(weight, mesh, found.placements)).sum().full_tensor().backward()
    (expected * weight).sum().backward()
    for one, other in zip(own, exact, strict=True):
        assert isinstance(one.grad, DTensor)
        assert other.grad is not None
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)
    return found


@pytest.mark.sweep(1)
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("heads", [(6, 6), (4, 4), (6, 2), (6, 1), (4, 2), (2, 2)])
def test_heads_cut(heads: tuple[int, int]) -> None:
    """Evenly and not; where there are fewer heads of keys than ranks, these share them."""
    mesh = mesh_of((disttrain.get_world_size(),))
    rule = rule_called("all", BATCH, heads[0], LENGTH)
    found = assert_as_a_whole(attention, mesh, heads, rule, [[Shard(1)]] * 3)
    assert found.placements == (Shard(1),)


@on_ranks(2)
def test_sequences_cut_and_others_whole() -> None:
    mesh = mesh_of((2,))
    for lie in ([[Shard(0)]] * 3, [[Shard(1)], [Replicate()], [Replicate()]], [[Replicate()], [Shard(0)], [Shard(0)]]):
        for name in ("causal documents", "all"):
            assert_as_a_whole(attention, mesh, (4, 2), rule_called(name, BATCH, 4, LENGTH), lie)


@on_ranks(4)
def test_two_axes() -> None:
    mesh = mesh_of((2, 2))
    rule = rule_called("all", BATCH, 4, LENGTH)
    for heads in ((4, 2), (4, 1)):
        assert_as_a_whole(attention, mesh, heads, rule, [[Shard(0), Shard(1)]] * 3)
    assert_as_a_whole(attention, mesh, (4, 2), rule, [[Shard(1), Shard(1)]] * 3)


@on_ranks(2, timeout_s=360)
def test_within_a_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    rule = rule_called("all", BATCH, 4, LENGTH)
    assert_as_a_whole(compiled, mesh_of((2,)), (4, 2), rule, [[Shard(1)]] * 3)


@on_ranks(2)
def test_parts_that_fit_send_nothing() -> None:
    mesh = mesh_of((2,))
    own = [distribute_tensor(one, mesh, [Shard(1)]) for one in tensors(BATCH, (4, 2), LENGTH, 8)]
    with CommDebugMode() as comms:
        attention(own[0], own[1], own[2], Causal())
    assert not comms.get_comm_counts()


class Layer(nn.Module):
    """Grouped-query attention with a soft cap."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(12, 16), nn.Linear(12, 8), nn.Linear(12, 8)
        self.output = nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, 4)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        attended = attention(query, key, value, Causal() & SoftCap(1.0))
        result: torch.Tensor = self.output(attended.transpose(1, 2).flatten(-2))
        return result


@on_ranks(2)
def test_a_layer_under_tensor_parallelism() -> None:
    torch.manual_seed(0)
    whole = Layer()
    layer = copy.deepcopy(whole)
    styles = {**dict.fromkeys(("query", "key", "value"), ColwiseParallel()), "output": RowwiseParallel()}
    parallelize_module(layer, mesh_of((2,)), styles)
    x = drawn(3, LENGTH, 12).float()
    found, expected = layer(x), whole(x)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(layer.parameters(), whole.parameters(), strict=True):
        assert isinstance(one.grad, DTensor)
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)


@on_ranks(2)
def test_positions_cut_are_refused() -> None:
    mesh = mesh_of((2,))
    query, key, value = (
        distribute_tensor(one, mesh, [lie])
        for one, lie in zip(tensors(BATCH, (4, 2), LENGTH, 8), (Shard(0), Shard(2), Shard(2)), strict=True)
    )
    with pytest.raises(LayoutError, match=r"axis 0 lays key of shape \(3, 2, 20, 8\) as S.*only sequences \(dim 0\)"):
        attention(query, key, value)
    with pytest.raises(LayoutError, match="query, key and value are DTensor, DTensor, Tensor"):
        attention(query, query, torch.zeros(1))


@on_ranks(3)
def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    """Also where a rank's own part would fit: none goes on alone."""
    mesh = mesh_of((3,))

    def cut(heads: tuple[int, int]) -> list[DTensor]:
        return [distribute_tensor(one, mesh, [Shard(1)]) for one in tensors(BATCH, heads, LENGTH, 8)]

    for heads, num_kv in (((8, 3), 3), ((2, 4), 4)):
        with pytest.raises(ShapeError, match=f"{num_kv} heads of keys cannot serve {heads[0]} heads of queries"):
            attention(*cut(heads))
    for rule, wanted in (
        (Alibi(torch.zeros(5)), r"\(6,\)"),
        (Prefix(torch.zeros(2)), r"\(3,\)"),
        (Documents(torch.zeros(4, LENGTH)), r"\(3, 20\)"),
    ):
        with pytest.raises(ShapeError, match=f"Give {wanted} on cpu"):
            attention(*cut((6, 2)), rule)


@on_ranks(3)
def test_heads_that_are_cut_unevenly_alike_stay_where_they_are() -> None:
    mesh = mesh_of((3,))
    query, key, value = (distribute_tensor(one, mesh, [Shard(1)]) for one in tensors(BATCH, (4, 4), LENGTH, 8))
    with CommDebugMode() as comm:
        attention(query, key, value, Causal())
    assert comm.get_total_counts() == 0


@on_ranks(3)
def test_all_ranks_take_what_the_first_has_found() -> None:
    """Each finds another implementation to be faster."""
    faster = ("sdpa", "dense", "sdpa")[disttrain.get_rank()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_choice, "candidates", lambda machine, call: ("sdpa", "dense"))
        patch.setattr(attention_choice, "_may_measure", lambda tensors: True)
        patch.setattr(attention_choice, "measure", lambda names, *_: {name: 1.0 + (name != faster) for name in names})
        patch.setattr(attention_choice, "_CHOICES", attention_choice._Choices())
        for length in (3, 4):
            query, key, value = tensors(1, (2, 1), length, 4)
            attention(query, key, value)
        own = [choice.name for choice in attention_choices()]
    found: list[Any] = [None] * 3
    disttrain.all_gather_object(found, own)
    assert found == [own] * 3
    assert len(own) == 2
