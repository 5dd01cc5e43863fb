"""Meshes over real ranks: sub-meshes by name, and the groups along their axes."""

from __future__ import annotations

import pytest
import torch

import disttrain
from disttrain import DeviceMesh, init_device_mesh
from disttrain.dtensor import DTensor, Partial
from disttrain.errors import LayoutError, MeshError
from disttrain.testing.pytest_plugin import on_ranks


@on_ranks(4)
def test_groups_run_along_the_axes() -> None:
    rank = disttrain.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert mesh.get_coordinate() == (rank // 2, rank % 2)
    assert (mesh.ndim, mesh.shape, mesh.size(), mesh.size(1), mesh.mesh_dim_names) == (2, (2, 2), 4, 2, ("dp", "tp"))
    for axis, members in (("dp", [rank % 2, rank % 2 + 2]), ("tp", [rank // 2 * 2, rank // 2 * 2 + 1])):
        submesh = mesh[axis]
        assert submesh.layout.ranks == tuple(members)
        assert submesh.root is mesh
        # The sub-mesh and the mesh share the axis's group.
        assert submesh.get_group() is mesh.get_group(axis)
        assert mesh.get_local_rank(axis) == submesh.get_local_rank() == members.index(rank)
        tensor = torch.tensor([float(rank)])
        disttrain.all_reduce(tensor, group=submesh.get_group())
        assert tensor.item() == sum(members)
    assert mesh["dp", "tp"] is mesh
    assert mesh["tp", "dp"].mesh.tolist() == [[0, 2], [1, 3]]
    assert len(mesh.get_all_groups()) == 2


@on_ranks(3)
def test_a_mesh_of_some_ranks() -> None:
    rank = disttrain.get_rank()
    mesh = DeviceMesh("cpu", [2, 0])
    assert mesh.get_coordinate() == {0: (1,), 1: None, 2: (0,)}[rank]
    if rank == 1:
        with pytest.raises(MeshError, match="this rank is not on"):
            mesh.get_group()
    else:
        gathered = torch.empty(2)
        disttrain.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=mesh.get_group())
        assert gathered.tolist() == [2.0, 0.0]
    assert mesh == DeviceMesh("cpu", torch.tensor([2, 0]))
    assert hash(mesh) == hash(DeviceMesh("cpu", [2, 0]))
    assert mesh != DeviceMesh("cpu", [0, 2])


@on_ranks(2)
def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(MeshError, match=r"shape \(3,\) has 3 places, the job 2 ranks"):
        init_device_mesh("cpu", (3,))
    with pytest.raises(MeshError, match=r"ranks \[2\] are outside the job's 2 ranks"):
        DeviceMesh("cpu", [0, 2])
    mesh = init_device_mesh("cpu", (1, 2))
    with pytest.raises(MeshError, match="Name the axes with mesh_dim_names"):
        mesh["dp"]
    with pytest.raises(MeshError, match=r"2 axes \(1x2\)\. Say which one"):
        mesh.get_group()


@on_ranks(4)
def test_axes_as_one() -> None:
    rank = disttrain.get_rank()
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    flat = mesh["dp", "cp"]._flatten()
    assert (flat.mesh_dim_names, flat.shape, flat.layout.ranks) == (("dp_cp",), (2,), (rank % 2, rank % 2 + 2))
    assert flat.root is mesh
    assert mesh["dp_cp"] == flat
    assert flat._flatten() is flat
    assert flat.get_group() is mesh["dp"].get_group()
    assert mesh.get_group("dp_cp") is mesh["tp", "dp"].get_group("dp_cp") is flat.get_group("dp_cp") is flat.get_group()
    assert mesh.get_local_rank("dp_cp") == mesh["tp"].get_local_rank("dp_cp") == rank // 2
    both = mesh["dp_cp", "tp"]
    assert (both.shape, both.mesh_dim_names, both.layout.ranks) == ((2, 2), ("dp_cp", "tp"), (0, 1, 2, 3))
    whole = mesh._flatten("all")
    assert whole.get_group() is mesh.get_group("all") is disttrain.group.WORLD
    assert mesh.get_local_rank("all") == rank
    tensor = torch.tensor([float(rank)])
    disttrain.all_reduce(tensor, group=whole.get_group())
    assert tensor.item() == 6
    with pytest.raises(MeshError, match=r"'tp' is another axis of dp=2 cp=1 tp=2\. Give another name"):
        mesh["dp", "cp"]._flatten("tp")
    with pytest.raises(MeshError, match="'all' is another axis"):
        mesh["dp", "cp"]._flatten("all")
    with pytest.raises(MeshError, match="have no names"):
        init_device_mesh("cpu", (2, 2))._flatten()


@on_ranks(2)
def test_a_mesh_of_a_group() -> None:
    mesh = DeviceMesh.from_group(disttrain.group.WORLD, "cpu", mesh_dim_names=("dp",))
    assert mesh == init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    group = disttrain.new_group([1, 0], sort_ranks=False)
    turned = DeviceMesh.from_group(group, "cpu", [1, 0])
    assert turned.get_group() is group
    gathered = torch.empty(2)
    disttrain.all_gather_into_tensor(gathered, torch.tensor([float(disttrain.get_rank())]), group=turned.get_group())
    assert gathered.tolist() == [1.0, 0.0]
    with pytest.raises(MeshError, match=r"mesh \[0, 1\] has other rows than the groups' \[\[1, 0\]\]"):
        DeviceMesh.from_group(group, "cpu", [0, 1])
    with pytest.raises(MeshError, match="no group was given"):
        DeviceMesh.from_group([], "cpu")


@on_ranks(4)
def test_a_mesh_of_groups() -> None:
    rank = disttrain.get_rank()
    columns = [disttrain.new_group([0, 2]), disttrain.new_group([1, 3])]
    rows = [disttrain.new_group([0, 1]), disttrain.new_group([2, 3])]
    groups = [columns[rank % 2], rows[rank // 2]]
    mesh = DeviceMesh.from_group(groups, "cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh.layout == other.layout
    assert mesh != other
    assert mesh == DeviceMesh.from_group(groups, "cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    assert mesh.get_all_groups() == groups
    beside = DTensor.from_local(torch.ones(1), other, [Partial(), Partial()])
    tensor = DTensor.from_local(torch.ones(1), mesh, [Partial(), Partial()])
    assert tensor.device_mesh is mesh
    with pytest.raises(LayoutError, match="2 meshes with groups of their own"):
        tensor + beside
    assert mesh["tp"].get_group() is groups[1]
    assert mesh["tp", "dp"].get_all_groups() == groups[::-1]
    mesh["tp"]._flatten("same")
    assert mesh["same"].get_group() is mesh.get_group("same") is groups[1]
    tensor = torch.tensor([float(rank)])
    disttrain.all_reduce(tensor, group=mesh.get_group("dp"))
    assert tensor.item() == 2 * (rank % 2) + 2
    with pytest.raises(MeshError, match="Give mesh and mesh_dim_names"):
        DeviceMesh.from_group(groups, "cpu")
    with pytest.raises(MeshError, match="has other rows than the groups'"):
        DeviceMesh.from_group(groups[::-1], "cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    with pytest.raises(MeshError, match="a group was given that this rank is not in"):
        DeviceMesh.from_group(columns[1 - rank % 2], "cpu")
