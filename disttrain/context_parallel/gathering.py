"""Gathers tensors whose positions are cut, uneven parts too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from disttrain.errors import ShapeError
from disttrain.kernels.attention.context.parts import Parts, mirrored
from disttrain.mesh import DeviceMesh
from disttrain.process_group.calls.collectives import all_gather_into_tensor


def gathered(
    operation: str, axis: DeviceMesh, parts: Parts | None, tensors: Sequence[torch.Tensor], dims: Sequence[int]
) -> list[torch.Tensor]:
    """The whole tensors. `parts` None: two mirrored runs each, of as many positions as all ranks have together."""
    size = tensors[0].shape[dims[0]]
    sizes = _gather(torch.tensor([size]), axis).flatten().tolist()
    if parts is None:
        parts = mirrored(sum(sizes), axis.size())
    if [*parts.sizes] != sizes:
        problem = f"the ranks have {sizes} positions; {parts.length} positions are cut into {[*parts.sizes]}."
        raise ShapeError(operation, problem, "Give each rank's own part, all of it.", rank=axis.get_rank())
    return [_whole(tensor, dim % tensor.dim(), axis, parts) for tensor, dim in zip(tensors, dims, strict=True)]


def _whole(tensor: torch.Tensor, dim: int, axis: DeviceMesh, parts: Parts) -> torch.Tensor:
    # All have as many rows on the wire; what is missing to the longest part is filled up.
    first = tensor.movedim(dim, 0)
    padding = [0, 0] * (first.dim() - 1) + [0, max(parts.sizes) - len(first)]
    rows = _gather(F.pad(first, padding).contiguous(), axis)
    pieces = [each[:size] for each, size in zip(rows, parts.sizes, strict=True)]
    return parts.join(pieces, 0).movedim(0, dim)


def _gather(tensor: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """(ranks, ...) of tensors of one shape."""
    if axis.size() == 1:
        return tensor.unsqueeze(0)
    result = tensor.new_empty((axis.size(), *tensor.shape))
    all_gather_into_tensor(result.flatten(0, 1), tensor, axis.get_group())
    return result
