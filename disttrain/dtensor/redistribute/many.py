"""Redistributes the operands of one call: small ones that are reduced alike go in one collective.

Over a network a reduction of one number takes as long as one of thousands. The norms of a model's gradients, or partial
gradients in an optimizer's list, are hundreds of small tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch

from disttrain.dtensor.redistribute.local import redistribute_local
from disttrain.dtensor.redistribute.plan import AllReduce, plan_redistribute
from disttrain.dtensor.spec.layout import Layout, Spec
from disttrain.dtensor.spec.placement import Replicate

MAX_TOGETHER_BYTES: Final = 1 << 20
"""Larger tensors have a collective each: their bytes take the time, and joining them would need a copy."""

Move = tuple[int, Spec, Layout]
"""The operand's place, how it lies, and how it is to lie."""


class Moves:
    """The moves of one call, sorted once for all calls like it."""

    def __init__(self, moves: Sequence[Move]) -> None:
        groups: dict[Any, list[Move]] = {}
        for move in moves:
            # A move that is not a reduction is a group by itself.
            groups.setdefault(_reduction_of(move) or move[0], []).append(move)
        self._groups = list(groups.values())

    def run(self, parts: list[torch.Tensor]) -> None:
        """Put this rank's moved parts in place of the parts. Collective: every rank of the meshes."""
        for group in self._groups:
            if len(group) > 1:
                _reduce_together(parts, group)
            else:
                ((index, spec, layout),) = group
                parts[index] = redistribute_local(parts[index], spec, layout)


def goes_together(spec: Spec, layout: Layout) -> bool:
    """True for a move that shares its collective with others like it."""
    return _reduction_of((0, spec, layout)) is not None


def _reduction_of(move: Move) -> tuple[Layout, Layout, torch.dtype] | None:
    """The reduction that a move is, if it is small and nothing else: layouts before and after, without the placements
    that stay, and the dtype. None for any other move."""
    _, spec, layout = move
    if spec.is_symbolic or spec.mesh != layout.mesh or math.prod(spec.shape) * spec.dtype.itemsize > MAX_TOGETHER_BYTES:
        return None
    steps = plan_redistribute(spec.placements, layout.placements)
    if not steps or not all(isinstance(step, AllReduce) for step in steps):
        return None
    axes = {axis for step in steps for axis in step.axes}
    placements = [placement if axis in axes else Replicate() for axis, placement in enumerate(spec.placements)]
    source = spec.layout.with_placements(placements)
    return source, source.replicated(), spec.dtype


def _reduce_together(parts: list[torch.Tensor], group: Sequence[Move]) -> None:
    """As one tensor of one dim: reductions go element by element."""
    reduction = _reduction_of(group[0])
    assert reduction is not None
    source, target, dtype = reduction
    group_parts = [parts[index] for index, _, _ in group]
    row = torch.cat([part.reshape(-1) for part in group_parts])
    reduced = redistribute_local(row, Spec.of(source, (row.numel(),), dtype), target)
    for (index, _, _), part, moved in zip(
        group, group_parts, reduced.split([part.numel() for part in group_parts]), strict=True
    ):
        parts[index] = moved.view(part.shape)
