"""Queries, keys and values of whole sequences, and the axis whose ranks have parts of them."""

from __future__ import annotations

import torch

import disttrain
from tests.cases.kernels import drawn

BATCH = 2


def axis_of_all() -> disttrain.DeviceMesh:
    return disttrain.init_device_mesh("cpu", (disttrain.get_world_size(),), mesh_dim_names=("cp",))["cp"]


def whole(heads: tuple[int, int], length: int, dims: tuple[int, int] = (8, 8)) -> list[torch.Tensor]:
    shapes = ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
    return [drawn(BATCH, number, length, dim, seed=seed) for seed, (number, dim) in enumerate(shapes)]
