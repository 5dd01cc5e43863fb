"""Meshes over real ranks: sub-meshes by name, and the groups along their axes."""

from __future__ import annotations

import pytest
import torch

import disttrain
from disttrain import DeviceMesh, init_device_mesh
from disttrain.errors import MeshError
from disttrain.testing.pytest_plugin import on_ranks


@on_ranks(4)
def test_groups_run_along_the_axes() -> None:
    rank = disttrain.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert mesh.get_coordinate() == [rank // 2, rank % 2]
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
    assert mesh.get_coordinate() == {0: [1], 1: None, 2: [0]}[rank]
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
