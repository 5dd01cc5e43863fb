"""Tensors in which several elements are one place in memory, as after `expand` and `unfold`.

A copy of such a tensor has a place for each. Of a write to some of them, the others know nothing: only what has changed
may go back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from disttrain.errors import LayoutError

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def overlaps_itself(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """False where no two elements of a tensor of these strides can share a place."""
    reach = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += step * (size - 1)
    return False


def check_can_merge(spec: Any) -> None:
    """Raise LayoutError on all ranks where what has changed of a tensor is not what has changed of its parts."""
    if spec.layout.has_partial:
        raise LayoutError(
            "write to a view",
            f"a tensor of shape {spec.shape} and strides {spec.stride} that lies as {spec.layout} has elements that "
            "share memory, and its view lies elsewhere.",
            "Redistribute it to Replicate() or Shard(dim) first, or write to the tensor that was expanded or unfolded.",
            rank=spec.mesh.world.rank,
        )


def write_changes(new: torch.Tensor, old: torch.Tensor, part: torch.Tensor) -> None:
    """Write to `part` those elements of `new` that are not as in `old`; both are contiguous."""
    if not part.numel():
        return
    changed = (_bits(new) != _bits(old)).view(*part.shape, -1).any(-1)
    offsets = torch.zeros((), dtype=torch.int64, device=part.device)
    for size, step in zip(part.shape, part.stride(), strict=True):
        offsets = offsets[..., None] + torch.arange(size, device=part.device) * step
    flat = part.as_strided((int(offsets.max()) + 1,), (1,))
    flat[offsets[changed]] = new[changed]


def _bits(values: torch.Tensor) -> torch.Tensor:
    numbers = torch.view_as_real(values) if values.is_complex() else values
    return numbers.view(_BITS[numbers.element_size()])
