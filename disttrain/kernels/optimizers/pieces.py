"""Takes apart what an optimizer has of its parameters into what its kernels read and write, on this rank.

It is done for each parameter in each step, so that it takes little matters where a model is small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from disttrain.dtensor import DTensor, Replicate
from disttrain.dtensor.local_part import local_part, spec_of
from disttrain.dtensor.spec.layout import Layout
from disttrain.dtensor.views.calls import up_to_date
from disttrain.kernels._torch import grads_of
from disttrain.kernels.optimizers.rules import Piece


class Pieces:
    """The pieces of one step. What layouts have in common is found out once."""

    def __init__(self) -> None:
        self._part_of: dict[Layout, tuple[int, int]] = {}

    def of(
        self, parameter: Any, state: dict[str, Any], names: Sequence[str], index: int, copy: torch.Tensor | None
    ) -> Piece:
        """The piece of the optimizer's parameter number `index`, which has a gradient, and a `state` by `names`."""
        grad, local, number = parameter.grad, parameter, index
        if isinstance(parameter, DTensor):
            layout = spec_of(parameter).layout
            # Of one layout there is one object; those of other meshes may have the same placements.
            if spec_of(grad).layout is not layout and tuple(grad.placements) != tuple(parameter.placements):
                grad = grad.redistribute(placements=parameter.placements)
            num_parts, position = self._part_of.get(layout) or self._part_of.setdefault(layout, part_of(layout))
            grad, local, number = local_part(grad), up_to_date(parameter), index * num_parts + position
        states = tuple([_part(state[name]) for name in names])
        master = _part(state["master"]) if "master" in state else None
        return Piece(local, grad.contiguous(), states, master, number, copy)


def those_with_grads(parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Those that have a gradient, and their gradients."""
    grads = grads_of(parameters)
    with_grads = [parameter for parameter, grad in zip(parameters, grads, strict=True) if grad is not None]
    return with_grads, [grad for grad in grads if grad is not None]


def part_of(layout: Layout) -> tuple[int, int]:
    """How many ranks there are, and which part this one has: the same as another one if that has a copy of it."""
    mesh = layout.mesh
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    number = 0
    for size, position, placement in zip(mesh.shape, coordinate, layout.placements, strict=True):
        number = number * size + (0 if isinstance(placement, Replicate) else position)
    return math.prod(mesh.shape), number


def _part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, of what nobody makes a view of."""
    return local_part(tensor) if isinstance(tensor, DTensor) else tensor
