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

    Collective of DTensors, once for each mesh and each set of its axes that some of them are cut along.
    """
    alike: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        alike[mesh, tensor.device, tensor.dtype].append(tensor)
    return _norm(torch.stack([_of_alike(some).to(tensors[0].device) for some in alike.values()]))


def _of_alike(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    # However they lie: a stack of norms is reduced at once.
    total = _norm(torch.stack(list(norms(tensors, wide_dtype(tensors[0].dtype)))))
    return total.full_tensor() if isinstance(total, DTensor) else total


def _norm(values: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(values)
    return norm
