"""The norm of gradients as of one vector, over all ranks, in fp32 where they are of half precision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from disttrain.dtensor import DTensor
from disttrain.kernels._torch import norms
from disttrain.kernels.choice import wide_dtype


def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A plain tensor on the first one's device; of half precision, a norm would round and soon be infinite.

    Collective of DTensors, once for each way in which they lie on a mesh.
    """
    alike: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        layout = (tensor.device_mesh, tuple(tensor.placements)) if isinstance(tensor, DTensor) else None
        alike[layout, tensor.device, tensor.dtype].append(tensor)
    return _norm(torch.stack([_of_alike(some).to(tensors[0].device) for some in alike.values()]))


def _of_alike(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    dtype = wide_dtype(tensors[0].dtype)
    if not isinstance(tensors[0], DTensor):
        return _norm(torch.stack(list(norms(tensors, dtype))))
    each = [torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in tensors]
    total = _norm(torch.stack(each))
    return total.full_tensor() if isinstance(total, DTensor) else total


def _norm(values: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(values)
    return norm
