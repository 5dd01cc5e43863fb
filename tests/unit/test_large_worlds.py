"""Worlds of a thousand ranks and of many: what a step, a mesh or a group takes is the same, to the byte almost."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator

import pytest
import torch

import disttrain
from disttrain.checkpoint.state.tree import spec_of
from disttrain.dtensor import Replicate, Shard, distribute_tensor
from disttrain.kernels.attention.dtensors import _index_of
from disttrain.mesh import DeviceMesh
from disttrain.process_group import current_world
from disttrain.ranks import Ranks

SIZES = (1 << 10, 1 << 14)
MOST_BYTES = 48 << 10
"""At any moment, beside what was there before. A list of the larger world's ranks has ten times as many."""


@pytest.fixture(params=SIZES)
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    disttrain.init_process_group("fake", rank=5, world_size=request.param)
    yield disttrain.init_device_mesh("cpu", (2, request.param // 16, 8), mesh_dim_names=("pp", "dp", "tp"))
    disttrain.destroy_process_group()


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> list[Ranks]:
    """All ranks of more than a few that are listed from now on."""
    listed: list[Ranks] = []
    ask = Ranks.listed.fget
    assert ask is not None

    def counted(ranks: Ranks) -> tuple[int, ...]:
        if len(ranks) > 64:
            listed.append(ranks)
        return ask(ranks)

    monkeypatch.setattr(Ranks, "listed", property(counted))
    return listed


def peak_bytes(call: Callable[[], object]) -> int:
    """The least memory that a call takes, of several from one line: the first fills caches, others' threads may add."""
    peaks = []
    for _ in range(4):
        tracemalloc.start()
        call()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return min(peaks)


def check(call: Callable[[], object], listings: list[Ranks]) -> None:
    assert peak_bytes(call) < MOST_BYTES
    assert listings == []


def test_groups_along_axes_and_slices(mesh: DeviceMesh, listings: list[Ranks]) -> None:
    check(lambda: [mesh.group_along(axes) for axes in ([0, 1], [1, 2], [2, 0], [0, 1, 2])], listings)
    check(lambda: [mesh[names] for names in (("pp", "dp"), ("dp", "tp"), "dp", ("tp", "pp"))], listings)
    check(lambda: mesh["pp", "dp"]._flatten("rows"), listings)
    check(lambda: mesh["dp"].joined_with(mesh["tp"]), listings)
    half = mesh.shape[1] // 2
    check(lambda: mesh._unflatten("dp", (2, half), ("replicate", "shard"))["replicate", "shard"], listings)
    check(lambda: (hash(mesh), mesh == mesh["pp", "dp", "tp"], mesh["dp"] == mesh["dp"]), listings)
    assert mesh["dp", "tp"].layout.members == Ranks.of(range(current_world("test").world_size // 2))


def test_meshes_and_groups_are_made_of_rules(mesh: DeviceMesh, listings: list[Ranks]) -> None:
    size = current_world("test").world_size
    check(lambda: disttrain.init_device_mesh("cpu", (size // 4, 4)), listings)
    check(disttrain.new_group, listings)
    check(lambda: disttrain.new_group(range(1, size, 2)), listings)
    group = mesh.get_group("dp")
    check(lambda: disttrain.new_group(group.members), listings)
    check(lambda: DeviceMesh.from_group(group, "cpu"), listings)
    check(lambda: disttrain.get_group_rank(group, disttrain.get_global_rank(group, 3)), listings)
    check(group.ranks_text, listings)
    check(lambda: repr(mesh), listings)


def test_a_step_of_tensors_on_several_axes(mesh: DeviceMesh, listings: list[Ranks]) -> None:
    tensor = distribute_tensor(torch.zeros(2 * mesh.shape[1], 8), mesh, [Shard(0), Shard(0), Replicate()])
    total = tensor.sum()
    check(lambda: total.redistribute(mesh, [Replicate()] * 3), listings)
    parameters = [torch.nn.Parameter(tensor) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = tensor
    check(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0), listings)
    on_slice = distribute_tensor(torch.zeros(4, 8), mesh["pp", "dp"], [Replicate(), Shard(0)])
    check(lambda: [spec_of("save", "weight", each) for each in (tensor, on_slice)], listings)
    check(lambda: _index_of(mesh["tp"], mesh), listings)


def test_a_group_of_a_list_has_the_memory_of_a_rule(mesh: DeviceMesh) -> None:
    ranks = list(range(current_world("test").world_size))
    made = disttrain.new_group(ranks)
    tracemalloc.start()
    again = disttrain.new_group(ranks)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert isinstance(made, disttrain.ProcessGroup)
    assert isinstance(again, disttrain.ProcessGroup)
    assert made.members == again.members == current_world("test").default_group.members
    assert kept < MOST_BYTES


def test_ranks_without_a_rule(mesh: DeviceMesh) -> None:
    """Permuted meshes, and groups of arbitrary ranks, are lists as ever."""
    size = current_world("test").world_size
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1))
    permuted = DeviceMesh("cpu", order.view(4, -1), mesh_dim_names=("a", "b"))
    row = (order == 5).nonzero().item() // (size // 4)
    assert permuted["b"].layout.ranks == tuple(order.view(4, -1)[row].tolist())
    assert permuted.group_along([0, 1]).ranks == tuple(order.tolist())
    group = disttrain.new_group([0, 5, 6, 9, 700])
    assert isinstance(group, disttrain.ProcessGroup)
    assert (group.ranks, group.group_rank, group.group_rank_of("test", 700)) == ((0, 5, 6, 9, 700), 1, 4)
