"""fully_shard of blocks whose experts lie on an axis within its mesh: one call shards dense parts over all of its ranks
and experts over the rest, and everything trains like one process. Most ranks are threads, which take half the time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain import kernels
from disttrain.dtensor import DTensor, Replicate, Shard, StridedShard
from disttrain.errors import ShardingError
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.mesh import DeviceMesh
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.sharded_experts import ExpertBlock, stack

Sizes = dict[str, int]


def mesh_of(sizes: Sizes) -> DeviceMesh:
    return disttrain.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def cut(model: nn.Sequential, mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    for block in model:
        if isinstance(block, ExpertBlock):
            block.experts.cut_over(mesh["ep"])
    data = data_mesh(mesh)
    for block in model[1:3]:
        fully_shard(block, mesh=data, **options)
    return fully_shard(model, mesh=data, **options)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    names = [name for name in mesh.mesh_dim_names or () if name != "replicate"]
    flat = mesh[tuple(names)]._flatten("fsdp")
    return mesh["replicate", "fsdp"] if "replicate" in (mesh.mesh_dim_names or ()) else flat


def rows(step: int) -> torch.Tensor:
    return torch.randn(24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def own(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(disttrain.get_world_size())[disttrain.get_rank()]


def assert_trains_alike(
    model: nn.Module,
    whole: nn.Module,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    num_steps: int = 2,
    max_norm: float = 0.02,
) -> None:
    """Clipped gradients, norms and parameters of all steps."""
    mine, theirs = make(model.parameters(), lr=0.05), make(whole.parameters(), lr=0.05)
    for step in range(num_steps):
        model(own(rows(step))).square().mean().backward()
        whole(rows(step)).square().mean().backward()
        for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(
                parameter.grad.full_tensor(), other.grad, msg=lambda text, at=name: f"{at} {text}"
            )
        found = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        expected = nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
        assert expected > max_norm
        torch.testing.assert_close(found.full_tensor() if isinstance(found, DTensor) else found, expected)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), other.data, msg=lambda text, at=name: f"{at} {text}")


MESHES: dict[str, Sizes] = {
    "dp and ep": {"dp": 2, "ep": 2},
    "one of dp": {"dp": 1, "ep": 4},
    "one of ep": {"dp": 4, "ep": 1},
    "ep alone": {"ep": 4},
    "ep outside": {"ep": 2, "dp": 2},
    "copies": {"replicate": 2, "dp": 1, "ep": 2},
    "copies of one": {"replicate": 1, "dp": 2, "ep": 2},
    "copies of experts": {"replicate": 2, "ep": 2},
    "three axes": {"dp": 2, "ep": 2, "cp": 1},
}


def check_sharded(whole: nn.Sequential, sizes: Sizes) -> None:
    mesh = mesh_of(sizes)
    model = cut(copy.deepcopy(whole), mesh)
    assert model[1].router.weight.device_mesh == data_mesh(mesh)
    assert model[1].experts.up.device_mesh.mesh_dim_names[-1] == "ep"
    assert_trains_alike(model, copy.deepcopy(whole))


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_one_call_shards_experts_over_the_rest_of_its_mesh(sizes: Sizes) -> None:
    for num_experts in (4, 5, 3):
        run_threads(4, check_sharded, stack(num_experts), sizes)


@on_ranks(4)
@pytest.mark.parametrize("name", ["dp and ep", "copies"])
def test_one_call_over_gloo(name: str) -> None:
    check_sharded(stack(5), MESHES[name])


@on_ranks(4)
def test_placements_of_experts() -> None:
    mesh = mesh_of({"dp": 2, "ep": 2})
    by_num = {num: cut(stack(num), mesh)[1].experts.up for num in (4, 2, 3)}
    assert {weight.device_mesh for weight in by_num.values()} == {mesh}
    # Fewer experts on a rank than ranks to cut for, or other numbers of them: along the next dim.
    assert by_num[4].placements == (StridedShard(0, 2), Shard(0))
    assert by_num[2].placements == by_num[3].placements == (Shard(1), Shard(0))
    assert cut(stack(4), mesh_of({"ep": 4}))[1].experts.up.to_local().shape == (1, 8, 6)


OPTIONS: dict[str, dict[str, Any]] = {
    "kept": {"reshard_after_forward": False},
    "on two": {"reshard_after_forward": 2},
    "on four": {"reshard_after_forward": 4},
    "all freed": {"reshard_after_forward": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_experts_are_freed_as_asked(options: dict[str, Any]) -> None:
    def check(whole: nn.Sequential) -> None:
        model = cut(copy.deepcopy(whole), mesh_of({"dp": 2, "ep": 2}), **options)
        assert_trains_alike(model, copy.deepcopy(whole))

    run_threads(4, check, stack())


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "kernels.AdamW": kernels.AdamW,
    "kernels.Lion": kernels.Lion,
    "kernels.SGD": kernels.SGD,
    "SGD": torch.optim.SGD,
    "AdamW, one by one": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, foreach=False),
    "AdamW, fused": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_experts_beside_the_rest(name: str) -> None:
    def check(whole: nn.Sequential) -> None:
        model = cut(copy.deepcopy(whole), mesh_of({"dp": 2, "ep": 2}))
        assert_trains_alike(model, copy.deepcopy(whole), OPTIMIZERS[name])

    run_threads(4, check, stack(3))


@on_ranks(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("only_sums", [False, True])
def test_experts_in_half_precision(dtype: torch.dtype, only_sums: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    whole = stack().float()
    model = cut(copy.deepcopy(whole), mesh_of({"dp": 2, "ep": 2}), mp_policy=policy)
    for module in model.modules():
        if only_sums and hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
    model(own(rows(0)).float()).float().square().mean().backward()
    whole(rows(0).float()).square().mean().backward()
    for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
        found = parameter.grad.full_tensor()
        assert (found - other.grad).norm() < 0.1 * other.grad.norm()


@on_ranks(4)
def test_a_factor_replaces_the_data_ranks_of_all() -> None:
    whole = stack()
    model = cut(copy.deepcopy(whole), mesh_of({"dp": 2, "ep": 2}))
    for module in (model, *model[1:3]):
        module.set_gradient_divide_factor(2.0)
    model(own(rows(0))).square().mean().backward()
    whole(rows(0)).square().mean().backward()
    for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), 2 * other.grad)


@on_ranks(4)
@pytest.mark.parametrize("sizes", [{"dp": 2, "ep": 2}, {"replicate": 2, "dp": 1, "ep": 2}], ids=str)
@pytest.mark.parametrize("setting", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_experts_gradients_add_up(sizes: Sizes, setting: str) -> None:
    whole = stack()
    model = cut(copy.deepcopy(whole), mesh_of(sizes))
    for step in range(3):
        getattr(model, setting)(step == 2)
        model(own(rows(step))).square().mean().backward()
        whole(rows(step)).square().mean().backward()
    for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), other.grad)


def by_a_mesh_of_their_own(model: nn.Sequential, mesh: DeviceMesh) -> None:
    for block in model[1:3]:
        own_params = {*block.experts.parameters()}

        def place(parameter: nn.Parameter, own_params: set[nn.Parameter] = own_params) -> Any:
            is_own = parameter in own_params
            return SimpleNamespace(placement=Shard(1), mesh_info=SimpleNamespace(mesh=mesh["dp"])) if is_own else None

        fully_shard(block, mesh=data_mesh(mesh), shard_placement_fn=place)
        block.set_gradient_divide_factor(4)


def experts_first(model: nn.Sequential, mesh: DeviceMesh) -> None:
    for block in model[1:3]:
        fully_shard(block.experts, mesh=mesh["dp"])
        block.experts.set_gradient_divide_factor(4)
        fully_shard(block, mesh=data_mesh(mesh))


def in_two_grids(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Dense parts on a mesh that was not made of that with the experts' axis."""
    dense = disttrain.init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    for block in model[1:3]:
        fully_shard(block, mesh=dense)


def unflattened(model: nn.Sequential, mesh: DeviceMesh) -> None:
    for block in model[1:3]:
        fully_shard(block, mesh=mesh["dp", "ep"])
        assert block.experts.up.placements == (Replicate(), Shard(0), Shard(0))


WAYS = {way.__name__: way for way in (by_a_mesh_of_their_own, experts_first, in_two_grids, unflattened)}


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_say_it(way: str) -> None:
    def check(whole: nn.Sequential) -> None:
        model, mesh = copy.deepcopy(whole), mesh_of({"dp": 2, "ep": 2})
        for block in model[1:3]:
            block.experts.cut_over(mesh["ep"])
        WAYS[way](model, mesh)
        assert_trains_alike(fully_shard(model, mesh=data_mesh(mesh)), copy.deepcopy(whole))

    run_threads(4, check, stack())


@on_ranks(4)
def test_what_lies_whole_on_an_axis_within_the_mesh_is_refused() -> None:
    mesh = mesh_of({"dp": 2, "ep": 2})
    block = ExpertBlock()
    block.router.weight = nn.Parameter(disttrain.dtensor.distribute_tensor(block.router.weight, mesh["ep"]))
    with pytest.raises(ShardingError, match=r"router\.weight lies on mesh ep=2") as caught:
        fully_shard(block, mesh=data_mesh(mesh))
    assert "mesh" in str(caught.value)
