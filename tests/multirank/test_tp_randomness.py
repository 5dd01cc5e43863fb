"""Dropout where activations are cut: each rank draws its own numbers, or its part of a single process's. On real ranks:
each has a random generator of its own, as threads have not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.dtensor import Shard
from disttrain.errors import MeshError
from disttrain.testing.pytest_plugin import on_ranks
from disttrain.tp import ColwiseParallel, PrepareModuleInput, RowwiseParallel, own_randomness, parallelize_module
from tests.cases.tensor_parallel import check_gradients


def tp_mesh() -> disttrain.DeviceMesh:
    return disttrain.init_device_mesh("cpu", (disttrain.get_world_size(),), mesh_dim_names=("tp",))


def of_all_ranks(values: torch.Tensor) -> list[torch.Tensor]:
    whole = values.new_empty((disttrain.get_world_size(), *values.shape))
    disttrain.all_gather_into_tensor(whole, values)
    return list(whole)


def draw_within(mesh: disttrain.DeviceMesh, num_values: int = 8) -> torch.Tensor:
    with own_randomness(mesh):
        return torch.rand(num_values)


@on_ranks(1, 2, 3)
def test_ranks_draw_their_own_and_go_on_alike() -> None:
    mesh = tp_mesh()
    torch.manual_seed(3)
    before, first, second, after = torch.rand(2), draw_within(mesh), draw_within(mesh, 100), torch.rand(2)
    every = [*of_all_ranks(first), *of_all_ranks(second[:8])]
    # No two ranks draw alike, nor one rank twice.
    assert len({tuple(values.tolist()) for values in every}) == 2 * mesh.size()
    for values in (before, after):
        assert all(torch.equal(values, others) for others in of_all_ranks(values))

    # All of it comes of the common seed, and what is outside neither of how much is drawn within nor of the ranks.
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), before)
    assert torch.equal(draw_within(mesh), first)
    draw_within(mesh, 0)
    assert torch.equal(torch.rand(2), after)

    # What it takes from outside is one number each time.
    torch.manual_seed(3)
    torch.rand(2)
    torch.randint(1 << 62, (2,))
    assert torch.equal(torch.rand(2), after)


@on_ranks(2)
def test_an_exception_within_leaves_the_common_state() -> None:
    mesh = tp_mesh()
    torch.manual_seed(0)
    draw_within(mesh)
    expected = torch.rand(2)
    torch.manual_seed(0)
    with pytest.raises(IndexError), own_randomness(mesh):
        torch.rand(5)[5]
    assert torch.equal(torch.rand(2), expected)


@on_ranks(4)
def test_one_axis_of_two() -> None:
    mesh = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    drawn = of_all_ranks(draw_within(mesh["tp"]))
    # Whoever has one place along the axis draws alike, unless the seeds differ.
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])
    with pytest.raises(MeshError, match="has 2 axes"), own_randomness(mesh):
        pass


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_what_is_computed_again_draws_the_same(reentrant: bool) -> None:
    mesh = tp_mesh()

    def attended(q: torch.Tensor) -> torch.Tensor:
        with own_randomness(mesh):
            y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
            return F.dropout(y, 0.5)

    q = torch.rand(1, 2, 6, 4)
    found = []
    for is_recomputed in (False, True):
        given = q.clone().requires_grad_()
        torch.manual_seed(5)
        y = checkpoint(attended, given, use_reentrant=reentrant) if is_recomputed else attended(given)
        draw_within(mesh)
        y.sin().sum().backward()
        found.append((y.detach(), given.grad, torch.rand(2)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(*of_all_ranks(found[0][0]))


@on_ranks(2)
def test_a_compiled_function_is_called_within() -> None:
    mesh = tp_mesh()
    compiled = torch.compile(lambda x: F.dropout(x, 0.5) + 1, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    with own_randomness(mesh):
        found = compiled(torch.ones(32))
    assert not torch.equal(*of_all_ranks(found))
    assert torch.equal(*of_all_ranks(torch.rand(2)))


class DroppingMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.dropout = nn.Dropout(0.5)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(self.up(x).relu()))


@on_ranks(2)
def test_dropout_as_a_module_draws_as_a_single_process_does() -> None:
    torch.manual_seed(0)
    alone, module = DroppingMLP(), DroppingMLP()
    module.load_state_dict(alone.state_dict())
    plan = {
        "up": ColwiseParallel(),
        "dropout": PrepareModuleInput(input_layouts=Shard(-1), desired_input_layouts=Shard(-1)),
        "down": RowwiseParallel(),
    }
    parallelize_module(module, tp_mesh(), plan)
    x = torch.rand(2, 5, 4)
    results = []
    for each in (alone, module):
        torch.manual_seed(1)
        results.append(each(x))
        results[-1].sin().sum().backward()
    torch.testing.assert_close(results[1], results[0])
    check_gradients(module, alone)
