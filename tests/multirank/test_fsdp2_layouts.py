"""fully_shard beyond one axis and the first dim: copies, other dims, other parallelisms, smaller groups, the host."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttrain
from disttrain.dtensor import DTensor, Placement, Replicate, Shard, StridedShard, distribute_tensor
from disttrain.errors import ShardingError
from disttrain.fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks
from tests.multirank import models


def sharded(model: nn.Module, **options: object) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def assert_trains_alike(model: nn.Module, reference: nn.Module, rank: int, num_ranks: int, num_steps: int = 3) -> None:
    """Train `model` on each rank's rows, `reference` on all of them; parameters stay equal."""
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.05) for one in (model, reference)]
    for step in range(num_steps):
        tokens = models.batch(step)
        models.loss_of(model, models.own_rows(tokens, rank, num_ranks)).backward()
        models.loss_of(reference, tokens).backward()
        for name, parameter in model.named_parameters():
            expected = reference.get_parameter(name).grad
            torch.testing.assert_close(
                parameter.grad.full_tensor(), expected, msg=lambda text, name=name: f"{name}: {text}"
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.full_tensor(), reference.get_parameter(name))


def check_copies(whole: nn.Module, shape: tuple[int, int], reshard: bool | None) -> None:
    mesh = disttrain.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = sharded(copy.deepcopy(whole), mesh=mesh, reshard_after_forward=reshard)
    assert model.embedding.weight.placements == (Replicate(), Shard(0))
    assert_trains_alike(model, copy.deepcopy(whole), disttrain.get_rank(), 4)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)], ids=str)
@pytest.mark.parametrize("reshard", [None, False])
def test_copies_beside_shards_train_like_one_process(shape: tuple[int, int], reshard: bool | None) -> None:
    run_threads(4, check_copies, models.TinyModel().double().init(0), shape, reshard)


@on_ranks(4)
def test_copies_beside_shards_over_gloo() -> None:
    check_copies(models.TinyModel().double().init(0), (2, 2), None)


def cut_last_dim(parameter: nn.Parameter) -> Placement | None:
    return Shard(-1) if parameter.ndim > 1 else None


@on_ranks(3)
def test_other_dims_are_cut_on_request() -> None:
    reference = models.TinyModel().double().init(0)
    model = sharded(copy.deepcopy(reference), shard_placement_fn=cut_last_dim)
    assert model.blocks[0].up.weight.placements == (Shard(1),)
    assert model.blocks[0].up.bias.placements == (Shard(0),)
    # 7 elements for 3 ranks: 3, 3 and 1.
    assert tuple(model.embedding.weight.to_local().shape) == (11, (3, 3, 1)[disttrain.get_rank()])
    assert_trains_alike(model, reference, disttrain.get_rank(), 3)


@on_ranks(4)
@pytest.mark.parametrize("cuts_last_dim", [False, True])
def test_parameters_stay_with_neighbours_between_forward_and_backward(cuts_last_dim: bool) -> None:
    reference = models.TinyModel().double().init(0)
    cut = cut_last_dim if cuts_last_dim else None
    model = sharded(copy.deepcopy(reference), reshard_after_forward=2, shard_placement_fn=cut)
    seen: list[tuple[int, ...]] = []

    class Ranks:
        def enqueued(self, call: object) -> None:
            if call.operation == "all_gather_into_tensor":
                seen.append(call.group.ranks)

        def completed(self, call: object, error: Exception | None) -> None:
            pass

    world, observer = disttrain.current_world(), Ranks()
    world.add_observer(observer)
    try:
        models.loss_of(model, models.own_rows(models.batch(0), disttrain.get_rank(), 4)).backward()
    finally:
        world.remove_observer(observer)
    first = disttrain.get_rank() // 2 * 2
    # The root and three blocks in forward, all again in backward.
    assert seen == [(0, 1, 2, 3)] * 4 + [(first, first + 1)] * 4
    model.zero_grad()
    assert_trains_alike(model, reference, disttrain.get_rank(), 4)


@on_ranks(2)
def test_shards_on_the_host_train_like_one_process() -> None:
    reference = models.TinyModel().double().init(0)
    model = sharded(copy.deepcopy(reference), offload_policy=CPUOffloadPolicy())
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert_trains_alike(model, reference, disttrain.get_rank(), 2)


class TwoHalves(nn.Module):
    """An MLP of two linears that tensor parallelism cuts by columns and then by rows."""

    def __init__(self, dim: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks whose parameters may be DTensors on `mesh`; inputs and outputs are plain."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoHalves() for _ in range(num_blocks))
        self.mesh: disttrain.DeviceMesh | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mesh is not None:
            x = DTensor.from_local(x, self.mesh, [Replicate()])
        for block in self.blocks:
            x = block(x)
        return x.full_tensor() if isinstance(x, DTensor) else x


CUTS: dict[str, Placement] = {
    "up.weight": Shard(0),
    "up.bias": Shard(0),
    "down.weight": Shard(1),
}


def cut_tensors(model: Stack, mesh: disttrain.DeviceMesh) -> Stack:
    for block in model.blocks:
        for name, parameter in list(block.named_parameters()):
            owner, _, attribute = name.rpartition(".")
            cut = distribute_tensor(parameter.detach(), mesh, [CUTS.get(name, Replicate())])
            setattr(block.get_submodule(owner), attribute, nn.Parameter(cut))
    model.mesh = mesh
    return model


@on_ranks(4)
@pytest.mark.parametrize("axes", [("dp",), ("replicate", "dp")], ids=str)
def test_tensor_parallel_parameters_are_sharded_once_more(axes: tuple[str, ...]) -> None:
    mesh = disttrain.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "dp", "tp"))
    torch.manual_seed(0)
    reference = Stack().double()
    model = cut_tensors(copy.deepcopy(reference), mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh[axes])
    fully_shard(model, mesh=mesh[axes])
    prefix = (Replicate(),) * (len(axes) - 1)
    first = model.blocks[0]
    assert first.up.weight.placements == (*prefix, StridedShard(0, 2), Shard(0))
    assert first.down.weight.placements == (*prefix, Shard(0), Shard(1))
    assert first.norm.weight.placements == (*prefix, Shard(0), Replicate())
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.05) for one in (model, reference)]
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        own = x.chunk(2)[mesh["dp"].get_local_rank()]
        model(own).square().mean().backward()
        reference(x).square().mean().backward()
        norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in (model, reference)]
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), reference.get_parameter(name))


@on_ranks(2)
def test_meshes_that_are_not_slices_of_one_are_refused() -> None:
    mesh = disttrain.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    other = disttrain.init_device_mesh("cpu", (2,))
    model = cut_tensors(Stack(), mesh)
    with pytest.raises(ShardingError, match="cannot be joined"):
        fully_shard(model.blocks[0], mesh=other)
    with pytest.raises(ShardingError, match="cannot be joined"):
        fully_shard(model.blocks[0], mesh=mesh)
    assert type(model.blocks[0]) is TwoHalves


@on_ranks(2)
def test_slices_of_which_an_equal_mesh_was_there_before() -> None:
    alone = disttrain.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    before = distribute_tensor(torch.zeros(4, 6), alone, [Shard(0)])
    mesh = disttrain.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    linear = nn.Linear(6, 4, bias=False)
    linear.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 6), mesh["tp"], [Shard(0)]))
    fully_shard(linear, mesh=mesh["dp"])
    assert linear.weight.device_mesh == mesh
    assert before.device_mesh is alone


@on_ranks(2)
@pytest.mark.parametrize("reduce_dtype", [torch.float16, torch.float32, None])
def test_sums_of_16_bits_do_not_overflow(reduce_dtype: torch.dtype | None) -> None:
    linear = nn.Linear(1, 4, bias=False)
    model = fully_shard(linear, mp_policy=MixedPrecisionPolicy(torch.float16, reduce_dtype))
    (model(torch.full((1, 1), 1.0)) * 50000.0).sum().backward()
    assert model.weight.grad.full_tensor().flatten().tolist() == [torch.tensor(5e4, dtype=torch.float16).item()] * 4
