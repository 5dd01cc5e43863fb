"""Flattened meshes, and meshes of groups, place ranks as torch's do; torch's groups here send nothing."""

from __future__ import annotations

import pytest
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import disttrain
from disttrain.process_group import World, entered_world
from disttrain.store import HashStore

# torch means to take this way to a flattened axis away.
pytestmark = pytest.mark.filterwarnings("ignore:Slicing a flattened dim from root mesh:UserWarning")

NUM_RANKS = 8
NAMES = ("dp", "cp", "tp")


def described(mesh: TorchMesh | disttrain.DeviceMesh) -> tuple[object, ...]:
    names = None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names)
    return mesh.mesh.tolist(), names, tuple(mesh.shape), tuple(mesh.get_coordinate() or ())


@pytest.mark.parametrize("rank", [0, 3, 6])
def test_meshes_are_torchs(rank: int) -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=NUM_RANKS)
    try:
        theirs = torch_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
        with entered_world(World(HashStore(), rank, NUM_RANKS, backend="fake", timeout_s=1.0)):
            ours = disttrain.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
            for names in (("dp", "cp"), ("cp", "tp"), ("dp",)):
                assert described(ours[names]._flatten()) == described(theirs[names]._flatten()), names
            assert described(ours["dp", "cp"]._flatten("data")) == described(theirs["dp", "cp"]._flatten("data"))
            for names in (("dp_cp",), ("dp_cp", "tp"), ("data", "tp"), ("dp", "cp_tp")):
                assert described(ours[names]) == described(theirs[names]), names
            made = disttrain.DeviceMesh.from_group(ours["dp"].get_group(), "cpu", mesh_dim_names=("x",))
            assert described(made) == described(
                TorchMesh.from_group(theirs["dp"].get_group(), "cpu", mesh_dim_names=("x",))
            )
            grid = ours["dp", "tp"].mesh.tolist()
            made = disttrain.DeviceMesh.from_group(
                [ours["dp"].get_group(), ours["tp"].get_group()], "cpu", grid, mesh_dim_names=("x", "y")
            )
            their_groups = [theirs["dp"].get_group(), theirs["tp"].get_group()]
            assert described(made) == described(
                TorchMesh.from_group(their_groups, "cpu", grid, mesh_dim_names=("x", "y"))
            )
    finally:
        torch.distributed.destroy_process_group()
