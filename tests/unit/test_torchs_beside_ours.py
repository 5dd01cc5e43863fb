"""torch's placements, meshes, tensors and styles, given to our functions: taken, or refused by a sentence of whose."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # torch.ops.fsdp
import torch.distributed.pipelining
from torch import nn

import disttrain
from disttrain import checkpoint, dtensor, fsdp2, pipelining, tp
from disttrain.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from disttrain.errors import (
    CheckpointError,
    DisttrainError,
    GroupError,
    LayoutError,
    MeshError,
    ShapeError,
    ShardingError,
)
from disttrain.process_group import World
from disttrain.testing import run_threads


@pytest.fixture
def mesh() -> Iterator[disttrain.DeviceMesh]:
    world = World(disttrain.HashStore(), 0, 1, backend="fake", timeout_s=1.0)
    with disttrain.process_group.entered_world(world):
        yield disttrain.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))


class _Mesh:
    """As torch's is to us: none of ours."""

    ndim, shape = 1, (1,)


_Mesh.__module__, _Mesh.__qualname__ = "torch.distributed.device_mesh", "DeviceMesh"


class _Tensor(torch.Tensor):
    """As torch's DTensor is to us."""

    _spec: object


_Tensor.__module__, _Tensor.__qualname__ = "torch.distributed.tensor", "DTensor"


def _foreign() -> torch.Tensor:
    theirs = torch.ones(4, 4).as_subclass(_Tensor)
    theirs._spec = object()
    return theirs


def _placements_are_taken(whole: torch.Tensor, alone: nn.Module) -> None:
    # Here, since it takes half a second, and all collect this file.
    theirs: Any = importlib.import_module("torch.distributed.tensor")
    mesh, rank = disttrain.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), disttrain.get_rank()
    rows = distribute_tensor(whole, mesh, [theirs.Shard(0)])
    assert rows.placements == (Shard(0),)
    for given, ours in (
        (theirs.Shard(-1), Shard(1)),
        (theirs.Replicate(), Replicate()),
        (theirs.Partial("max"), Partial("max")),
    ):
        assert rows.redistribute(placements=[given]).placements == (ours,)
    assert rows.redistribute(placements=theirs.Shard(1)).placements == (Shard(1),)
    parts = DTensor.from_local(whole, mesh, [theirs.Partial()])
    torch.testing.assert_close(parts.full_tensor(), 2 * whole)
    assert dtensor.zeros(4, 4, device_mesh=mesh, placements=[theirs.Shard(1)]).to_local().shape == (4, 2)
    doubled = dtensor.local_map(lambda part: part * 2, (theirs.Shard(0),), ((theirs.Shard(0),),), device_mesh=mesh)
    torch.testing.assert_close(doubled(rows).full_tensor(), whole * 2)
    model = copy.deepcopy(alone)
    expected = model(whole)
    plan = {
        "": tp.PrepareModuleInput(input_layouts=(theirs.Shard(0),), desired_input_layouts=(theirs.Replicate(),)),
        "0": tp.ColwiseParallel(input_layouts=theirs.Replicate(), output_layouts=theirs.Shard(-1)),
        "1": tp.RowwiseParallel(input_layouts=theirs.Shard(-1), output_layouts=theirs.Shard(0)),
    }
    tp.parallelize_module(model, mesh, plan)
    torch.testing.assert_close(model(whole.chunk(2)[rank]), expected.chunk(2)[rank])
    sharded: Any = fsdp2.fully_shard(
        nn.Linear(4, 4), mesh=mesh, shard_placement_fn=lambda one: theirs.Shard(one.ndim - 1)
    )
    assert sharded.weight.placements == (Shard(1),)


def test_placements_are_taken() -> None:
    alone = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    run_threads(2, _placements_are_taken, torch.arange(16.0).view(4, 4), alone)


@pytest.mark.parametrize(
    "call",
    [
        lambda mesh, x: distribute_tensor(x, mesh, [Shard(0)]),
        lambda mesh, x: DTensor.from_local(x, mesh, [Shard(0)]),
        lambda mesh, x: dtensor.zeros(4, device_mesh=mesh),
        lambda mesh, x: dtensor.rand(4, device_mesh=mesh),
        lambda mesh, x: dtensor.distribute_module(nn.Linear(4, 4), mesh),
        lambda mesh, x: tp.parallelize_module(nn.Linear(4, 4), mesh, tp.ColwiseParallel()),
    ],
)
def test_a_mesh_is_refused(mesh: disttrain.DeviceMesh, call: Callable[[Any, torch.Tensor], object]) -> None:
    with pytest.raises(MeshError, match=r"the mesh is a torch\.distributed\.device_mesh\.DeviceMesh, which is none of"):
        call(_Mesh(), torch.ones(4, 4))
    with pytest.raises(MeshError, match=r"the mesh is None\. Make it by disttrain\.init_device_mesh"):
        call(None, torch.ones(4, 4))
    with pytest.raises(ShardingError, match=r"the mesh is a torch\.distributed\.device_mesh\.DeviceMesh"):
        fsdp2.fully_shard(nn.Linear(4, 4), mesh=_Mesh())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda theirs, ours, mesh: distribute_tensor(theirs, mesh, [Shard(0)]),
        lambda theirs, ours, mesh: DTensor.from_local(theirs, mesh, [Shard(0)]),
        lambda theirs, ours, mesh: ours + theirs,
        lambda theirs, ours, mesh: ours.copy_(theirs),
        lambda theirs, ours, mesh: torch.cat([ours, theirs]),
        lambda theirs, ours, mesh: dtensor.local_map(lambda one: one, [Shard(0)], device_mesh=mesh)(theirs),
        lambda theirs, ours, mesh: tp.parallelize_module(_with(theirs), mesh, tp.ColwiseParallel()),
        lambda theirs, ours, mesh: fsdp2.fully_shard(_with(theirs), mesh=mesh),
    ],
)
def test_a_tensor_is_refused(mesh: disttrain.DeviceMesh, call: Callable[[Any, Any, Any], object]) -> None:
    ours = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    with pytest.raises(LayoutError, match=r"is a torch\.distributed\.tensor.*DTensor, which is none of disttrain's"):
        call(_foreign(), ours, mesh)


def _with(weight: torch.Tensor) -> nn.Module:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(weight)
    module.weight.__dict__["_spec"] = object()
    return module


def test_what_is_saved_is_ours(mesh: disttrain.DeviceMesh, tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tensor 'a' is a torch\.distributed\.tensor.*, which is none of"):
        checkpoint.save({"a": _foreign()}, tmp_path / "save")


def test_styles_and_messages_are_refused(mesh: disttrain.DeviceMesh) -> None:
    class ColwiseParallel:
        pass

    ColwiseParallel.__module__ = "torch.distributed.tensor.parallel.style"
    with pytest.raises(ShardingError, match=r"no plan of disttrain's: ColwiseParallel is torch's"):
        tp.parallelize_module(nn.Linear(4, 4), mesh, {"": ColwiseParallel()})  # type: ignore[dict-item]
    with pytest.raises(GroupError, match=r"a message is a builtins\.object, and none of disttrain's"):
        disttrain.batch_isend_irecv([object()])  # type: ignore[list-item]


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "gather", "send"])
def test_collectives_refuse_what_has_no_memory(operation: str) -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        one = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: disttrain.all_reduce(one),
            "all_gather": lambda: disttrain.all_gather([one, one], one),
            "gather": lambda: disttrain.gather(one, [one, one] if disttrain.get_rank() == 0 else None),
            "send": lambda: disttrain.send(one, 1 - disttrain.get_rank()),
        }
        with pytest.raises(DisttrainError, match=r"a tensor is a disttrain.*DTensor, which has no memory of its own"):
            calls[operation]()

    run_threads(2, body)


def test_errors_travel_as_pickles() -> None:
    error = ShapeError("all_reduce", "two do not fit.", "Mend it.", rank=3, where="mesh")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(again), str(again)) == (ShapeError, str(error))
    assert (again.operation, again.problem, again.remedy, again.rank, again.where) == (
        "all_reduce",
        "two do not fit.",
        "Mend it.",
        3,
        "mesh",
    )


def test_torchs_fully_shard_on_a_sharded_module_hears_whose_its_parameters_are(mesh: disttrain.DeviceMesh) -> None:
    """What its gather calls, when it takes our parameters for plain ones."""
    ours = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    with pytest.raises(
        LayoutError, match=r"torch's fully_shard computes with a parameter that disttrain has sharded\. Take"
    ):
        torch.ops.fsdp.all_gather_copy_in([ours], torch.empty(16), [16], 16, 0)


def test_torchs_schedule_hears_whose_a_stage_is(mesh: disttrain.DeviceMesh) -> None:
    stage = pipelining.PipelineStage(nn.Linear(2, 2), 0, 1, "cpu")
    schedule = torch.distributed.pipelining.ScheduleGPipe(stage, 1)  # type: ignore[arg-type]
    with pytest.raises(
        AttributeError, match=r"this one is disttrain's\. Run it by a schedule of disttrain\.pipelining"
    ):
        schedule.step(torch.ones(2, 2))
    assert not hasattr(stage, "nonsense")
