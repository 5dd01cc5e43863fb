"""Meshes in one page: ranks as a grid with named axes, and a group along each axis through each rank.

disttrain-launch --standalone --nproc-per-node 4 examples/mesh.py
"""

from __future__ import annotations

import torch

import disttrain
from disttrain.mesh import MeshLayout


def say(text: object) -> None:
    if disttrain.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    # Where ranks lie is arithmetic, known without any process.
    layout = MeshLayout(tuple(range(64)), (2, 8, 4), ("pp", "dp", "tp"))
    where = dict(zip(("pp", "dp", "tp"), layout.coordinate(37) or (), strict=True))
    beside = list(layout.along(37, [1]).ranks)

    disttrain.init_process_group()
    say(f"of 64 ranks as {layout}, rank 37 is at {where}; along dp with it are {beside}")
    size = disttrain.get_world_size()
    tp = 2 if size % 2 == 0 else 1
    device = disttrain.current_world().device
    mesh = disttrain.init_device_mesh(device.type, (size // tp, tp), mesh_dim_names=("dp", "tp"))
    say(f"this job: {mesh}")

    places: list[object] = [None] * size
    disttrain.all_gather_object(places, mesh.get_coordinate())
    say(f"coordinates by rank: {places}")

    # A collective along one axis: as many groups as there are ranks across it, each for itself.
    row = torch.tensor([disttrain.get_rank()], device=device)
    disttrain.all_reduce(row, group=mesh["tp"].get_group())
    column = torch.tensor([disttrain.get_rank()], device=device)
    disttrain.all_reduce(column, group=mesh.get_group("dp"))
    say(f"rank 0's sums of ranks: along tp {row.item()}, along dp {column.item()}")

    both = mesh["dp", "tp"]
    say(f"mesh['dp', 'tp'] is the mesh itself: {both is mesh}; mesh['dp'] has {mesh['dp'].size()} ranks")
    say(f"the group along both axes has {mesh.group_along([0, 1]).group_size}")
    try:
        mesh["pp"]
    except disttrain.errors.MeshError as error:
        say(f"an error is an answer: {error}")
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
