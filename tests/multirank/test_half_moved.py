"""Scripts of which some imports are still torch's: its functions are given meshes, placements and tensors of ours."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain.checkpoint import StateDictOptions, set_model_state_dict
from disttrain.dtensor import Partial, Replicate, Shard, distribute_tensor
from disttrain.errors import HalfMovedError, LayoutError, MeshError, ShapeError
from disttrain.fsdp2 import fully_shard
from disttrain.process_group.beside.torch_callers import OURS, PRIVATE_NAMES
from disttrain.testing.pytest_plugin import on_ranks

Call = Callable[[Any], object]


def _calls() -> dict[str, dict[str, Call]]:
    """By what they are to be told to import, functions of torch's that take a mesh."""
    # Here, as below: they take half a second to load, and ranks alone need them.
    from torch.distributed import fsdp, tensor
    from torch.distributed.tensor import experimental, parallel

    whole, cut = torch.ones(4, 4), [tensor.Shard(0)]
    makers = {
        name: lambda mesh, name=name: getattr(tensor, name)(4, 4, device_mesh=mesh, placements=cut)
        for name in ("empty", "ones", "rand", "randn", "zeros")
    }
    return {
        "disttrain.dtensor": {
            "distribute_tensor": lambda mesh: tensor.distribute_tensor(whole, mesh, cut),
            "distribute_module": lambda mesh: tensor.distribute_module(nn.Linear(4, 4), mesh),
            "DTensor.from_local": lambda mesh: tensor.DTensor.from_local(whole, mesh, cut),
            "full": lambda mesh: tensor.full((4, 4), 1.0, device_mesh=mesh, placements=cut),
            **makers,
        },
        "disttrain.context_parallel": {
            "context_parallel": lambda mesh: experimental.context_parallel(
                mesh, buffers=[whole], buffer_seq_dims=[0]
            ).__enter__()
        },
        "disttrain.tp": {
            "parallelize_module": lambda mesh: parallel.parallelize_module(
                nn.Linear(4, 4), mesh, parallel.ColwiseParallel()
            )
        },
        "disttrain.fsdp2": {"fully_shard": lambda mesh: fsdp.fully_shard(nn.Linear(4, 4), mesh=mesh)},
        "": {
            "distribute_tensor": lambda mesh: tensor.distribute_tensor(whole, mesh, cut, src_data_rank=None),
            "DistributedDataParallel": lambda mesh: nn.parallel.DistributedDataParallel(
                nn.Linear(4, 4), device_mesh=mesh
            ),
        },
    }


@on_ranks(1, 2)
def test_functions_of_torch_s_say_whose_mesh_they_are_given_and_what_to_import() -> None:
    mesh = disttrain.init_device_mesh("cpu", (disttrain.get_world_size(),), mesh_dim_names=("dp",))
    for package, calls in _calls().items():
        for name, call in calls.items():
            import_it = f"Import {re.escape(name.partition('.')[0])} from {re.escape(package)}; or make"
            first = import_it if package else "(Make|make)"
            asked = rf"torch\.[\w.]+\.{re.escape(name)}: it is torch's, and is given a mesh of disttrain's\. "
            with pytest.raises(HalfMovedError, match=rf"{asked}.*{first} the mesh by torch\.distributed"):
                call(mesh)
    disttrain.barrier()  # no rank has gone to a collective in which another waits


@on_ranks(1)
def test_placements_of_ours_are_refused() -> None:
    from torch.distributed import device_mesh, tensor
    from torch.distributed.tensor import parallel

    disttrain.current_world().default_group.to_torch()
    mesh = device_mesh.init_device_mesh("cpu", (1,))
    theirs = tensor.distribute_tensor(torch.ones(4, 4), mesh, [tensor.Shard(0)])
    said = "redistribute: it is torch's, and is given a placement of disttrain's.*make the placement by torch"
    with pytest.raises(HalfMovedError, match=said):
        theirs.redistribute(mesh, [Replicate()])
    style = parallel.ColwiseParallel(output_layouts=Replicate())  # type: ignore[arg-type]
    with pytest.raises(HalfMovedError, match=said):
        parallel.parallelize_module(nn.Linear(4, 4), mesh, style)(torch.ones(2, 4))
    for ours in (Shard(0), Replicate(), Partial()):
        said = "distribute_tensor: it is torch's, and is given a placement of disttrain's. Import distribute_tensor"
        with pytest.raises(HalfMovedError, match=said):
            tensor.distribute_tensor(torch.ones(4, 4), mesh, [ours])
        assert str(ours) == f"{ours}" == repr(ours)


@on_ranks(2)
def test_groups_of_ours_are_looked_up_in_vain_and_torch_s_are_taken() -> None:
    from torch.distributed import _functional_collectives as functional

    world = disttrain.current_world()
    world.default_group.to_torch()
    group = disttrain.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)).get_group()
    calls: dict[str, Call] = {
        "get_backend": torch.distributed.get_backend,
        "all_gather_object": lambda group: torch.distributed.all_gather_object([None, None], 1, group=group),
        "all_reduce": lambda group: functional.all_reduce(torch.ones(2), "sum", group),
    }
    for name, call in calls.items():
        said = (
            rf"{name}: it is torch's, and is given a group of disttrain's\. Call disttrain's {name}, or give .*to_torch"
        )
        with pytest.raises(HalfMovedError, match=said):
            call(group)
    theirs = disttrain.to_torch(group)
    assert torch.distributed.get_backend(theirs) == "gloo"
    assert functional.all_reduce(torch.ones(2), "sum", theirs).tolist() == [2.0, 2.0]
    objects: list[Any] = [None, None]
    torch.distributed.all_gather_object(objects, world.rank, group=theirs)
    assert objects == [0, 1]
    assert str(group) == repr(group)


@on_ranks(2)
def test_groups_of_ours_are_refused_where_c_plus_plus_or_a_mesh_of_torch_s_would_take_them() -> None:
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.device_mesh import DeviceMesh

    world = disttrain.current_world()
    world.default_group.to_torch()
    group: Any = disttrain.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)).get_group()
    calls: dict[str, Call] = {
        "DistributedDataParallel": lambda group: nn.parallel.DistributedDataParallel(
            nn.Linear(2, 2), process_group=group
        ),
        "replicate": lambda group: replicate(nn.Linear(2, 2), process_group=group)(torch.ones(1, 2)),
        "DeviceMesh.from_group": lambda group: DeviceMesh.from_group(group, "cpu"),
    }
    for name, call in calls.items():
        # What `replicate` makes, it makes in a hook.
        said = (
            rf"({name}|DistributedDataParallel): it is torch's, and is given a group of disttrain's\. Give .*to_torch"
        )
        for ours in (group, disttrain.group.WORLD):
            with pytest.raises(HalfMovedError, match=said):
                call(ours)
        call(disttrain.to_torch(group))
    assert group
    with pytest.raises(TypeError, match="'ProcessGroup' object is not iterable"):
        list(group)
    assert torch.distributed.get_backend_config(group) == "cpu:gloo"


@on_ranks(1)
def test_torch_s_checkpoints_name_ours() -> None:
    from torch.distributed import checkpoint

    disttrain.current_world().default_group.to_torch()
    mesh = disttrain.init_device_mesh("cpu", (1,))
    state = {"weight": distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])}
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(checkpoint.CheckpointException) as saved:
            checkpoint.save(state, checkpoint_id=folder)
        said = str(saved.value)
        assert "'weight' is a DTensor of disttrain's. Save with disttrain.checkpoint.save" in said
        checkpoint.save({"weight": torch.ones(4, 4)}, checkpoint_id=folder)
        with pytest.raises(checkpoint.CheckpointException) as loaded:
            checkpoint.load(state, checkpoint_id=folder)
        assert "DTensor of disttrain's, of shape (4, 4). Load with disttrain.checkpoint" in str(loaded.value)


@on_ranks(1)
def test_what_torch_reads_of_meshes_is_refused_to_torch_alone() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    disttrain.current_world().default_group.to_torch()
    mesh, theirs = disttrain.init_device_mesh("cpu", (1,)), DeviceMesh("cpu", [0])
    read = {name for name in (*vars(theirs), *vars(DeviceMesh)) if name.startswith("_") and not name.endswith("__")}
    not_read_of_others = {"_compute_coordinate_on_dim", "_compute_coordinates_from_mesh", "_init_process_groups"}
    not_read_of_others |= {
        "_get_mesh_tensor_from_full_mesh",
        "_init_one_process_group",
        "_setup_world_group_and_device",
    }
    unknown = {name for name in read if not hasattr(type(mesh), name) and not hasattr(mesh, name)}
    assert unknown - not_read_of_others - set(PRIVATE_NAMES) <= {"_rank", "_hash_key", "_stable_hash", "_abc_impl"}
    for name in PRIVATE_NAMES:
        assert not hasattr(mesh, name)
    with pytest.raises(AttributeError, match="object has no attribute '_rank_map'") as caught:
        _ = mesh._rank_map  # type: ignore[attr-defined]
    assert not isinstance(caught.value, MeshError)
    assert mesh.get_group().group_size == len(mesh.get_coordinate() or ()) == 1


def test_what_is_to_be_imported_is_there() -> None:
    import importlib

    for package, names in OURS.items():
        assert all(hasattr(importlib.import_module(package), name) for name in names), package


@on_ranks(2)
def test_a_description_of_a_mesh_that_a_script_makes_is_no_function_of_torchs() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    mesh = disttrain.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    info = FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0)
    assert info.shard_mesh_size == 2
    assert info.shard_process_group is mesh.get_group()


@on_ranks(2)
def test_of_a_sharded_model_it_is_said_what_to_do_where_its_shards_will_not_do() -> None:
    model = fully_shard(nn.Linear(4, 4))
    with pytest.raises(ShapeError, match="A model that fully_shard has sharded needs no DistributedDataParallel"):
        nn.parallel.DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match=r"set_model_state_dict\(model, state, options=StateDictOptions\(full_state"):
        model.load_state_dict(nn.Linear(4, 4).state_dict(), strict=False)
    with pytest.raises(LayoutError, match="within methods that register_fsdp_forward_method is told of"):
        nn.functional.linear(torch.ones(2, 4), model.weight)
    torch.manual_seed(0)
    whole = nn.Linear(4, 4).state_dict()
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
    assert torch.equal(model.weight.full_tensor(), whole["weight"])
