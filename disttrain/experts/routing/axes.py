"""Sums over the mesh axis along which ranks route together."""

from __future__ import annotations

import torch

from disttrain.mesh import DeviceMesh
from disttrain.process_group.functional import all_reduce, wait_tensor


@torch.no_grad()
def summed(numbers: torch.Tensor, axis: DeviceMesh | None) -> torch.Tensor:
    """`numbers` of all ranks of the axis together. Collective: every rank of it."""
    return numbers if axis is None else wait_tensor(all_reduce(numbers, "sum", axis))
